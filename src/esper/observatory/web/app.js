/* The page that `esper serve` shows. What a run looks like is in views.js; here is how one gets there.
 *
 *   address   #                                    the list of runs
 *             #run=ID&round=5&env=3&epoch=12       one run or evaluation, one network, one epoch
 *             #compare=ID&compare=ID               several runs over each other
 *   data      GET /api/runs, /api/run?id=, /api/compare?id=&id=
 *   live      /api/live tells that something has changed (server-sent events); the page then asks again
 */
"use strict";
(() => {
  const { html, render, useState, useEffect } = htmPreact;
  const { Page, Comparison, State, count, score } = EsperViews;

  const address = () => new URLSearchParams(location.hash.slice(1));
  const link = (parts) => "#" + new URLSearchParams(parts).toString();

  async function ask(path) {
    const answer = await fetch(path, { headers: { Accept: "application/json" } });
    if (answer.status === 401) location.reload();
    const told = await answer.json();
    if (!answer.ok) throw new Error(told.error || `the server answers ${answer.status}`);
    return told;
  }

  /** [data, fault]: asked again whenever the server says that it has changed. */
  function useLive(path, live) {
    const [told, tell] = useState({ path: null, data: null, fault: null });
    useEffect(() => {
      let wanted = true, asking = false, again = false;
      const load = async () => {
        if (asking) { again = true; return; }
        asking = true;
        try {
          const data = await ask(path);
          if (wanted) tell({ path, data, fault: null });
        } catch (error) {
          if (wanted) tell((before) => ({ ...before, path, fault: error.message }));
        }
        asking = false;
        if (again && wanted) { again = false; load(); }
      };
      load();
      const source = new EventSource(live);
      source.addEventListener("change", load);
      source.onerror = () => tell((before) => ({ ...before, fault: "no connection to the server; trying again" }));
      source.onopen = () => tell((before) => ({ ...before, fault: null }));
      return () => { wanted = false; source.close(); };
    }, [path, live]);
    return told.path === path || told.data ? [told.data, told.fault] : [null, told.fault];
  }

  const Fault = ({ text }) => text && html`<div class="fault" role="alert"><p>${text}</p></div>`;

  function List() {
    const [lines, fault] = useLive("/api/runs", "/api/live");
    const [words, search] = useState(""), [tags, setTags] = useState([]), [chosen, choose] = useState([]);
    if (!lines) return html`<${Fault} text=${fault} />`;
    const tagsOf = (line) => [line.state, line.kind, line.task].filter(Boolean);
    const all = [...new Set(lines.flatMap(tagsOf))];
    const wanted = words.toLowerCase().split(/\s+/).filter(Boolean);
    const shown = lines.filter((line) => {
      const text = [line.name, line.task, line.controller, line.state, line.kind].join(" ").toLowerCase();
      return wanted.every((word) => text.includes(word)) && tags.every((tag) => tagsOf(line).includes(tag));
    });
    const flip = (list, item) => (list.includes(item) ? list.filter((other) => other !== item) : [...list, item]);
    return html`<div><h1>Runs</h1><${Fault} text=${fault} />
      <div class="tools"><label class="unseen" for="search">Search</label><input id="search" type="search" placeholder="Search" value=${words} onInput=${(event) => search(event.target.value)} />
        <button type="button" disabled=${chosen.length < 2} onClick=${() => { location.hash = link(chosen.map((id) => ["compare", id])); }}>Compare ${chosen.length || ""} chosen</button></div>
      <div class="filters">${all.map((tag) => html`<button type="button" key=${tag} aria-pressed=${tags.includes(tag) ? "true" : "false"} onClick=${() => setTags(flip(tags, tag))}>${tag}</button>`)}</div>
      <div class="scroll below" tabindex="0" role="region" aria-label="Runs"><table><caption class="unseen">Runs</caption>
        <thead><tr><th scope="col">run</th><th scope="col" class="left">task, controller</th><th scope="col">validation</th><th scope="col">test</th><th scope="col">parameters</th><th scope="col">done</th><th scope="col">state</th><th scope="col">compare</th></tr></thead>
        <tbody>${shown.map((line) => html`<tr key=${line.id}>
          <th scope="row"><a class="name" href=${link({ run: line.id })}>${line.name}</a></th><td class="left name">${[line.task, line.controller].filter(Boolean).join(", ")}</td>
          <td>${score(line.val_score)}</td><td>${score(line.test_score)}</td><td>${count(line.params)}</td>
          <td>${line.done == null ? "–" : count(line.done) + (line.total == null ? "" : `/${count(line.total)}`)}</td>
          <td><${State} line=${line} /></td>
          <td>${line.kind !== "evaluation" && html`<input type="checkbox" aria-label=${`compare ${line.name}`} checked=${chosen.includes(line.id)} onChange=${() => choose(flip(chosen, line.id))} />`}</td>
        </tr>`)}</tbody></table></div>
      ${!lines.length && html`<p>No runs here yet. <code>esper grow --task digits</code> makes one, and it appears here by itself.</p>`}
      ${lines.length > 0 && !shown.length && html`<p>No run fits.</p>`}
    </div>`;
  }

  function One({ at }) {
    const id = at.get("run"), query = new URLSearchParams({ id });
    for (const name of ["round", "env"]) if (at.get(name)) query.set(name, at.get(name));
    const [data, fault] = useLive(`/api/run?${query}`, `/api/live?${new URLSearchParams({ id })}`);
    useEffect(() => { if (data) document.title = `${data.line.name} - Esper`; }, [data]);
    if (!data) return html`<${Fault} text=${fault} />`;
    const go = (changes, replace) => {
      const next = link({ ...Object.fromEntries(address()), ...changes });
      if (replace) { history.replaceState(null, "", next); dispatchEvent(new HashChangeEvent("hashchange")); }
      else location.hash = next;
    };
    const epoch = at.get("epoch");
    return html`<div><${Fault} text=${fault} /><${Page} data=${data} epoch=${epoch == null ? null : Number(epoch)}
      onEpoch=${(step) => go({ epoch: step }, true)} onEnvironment=${(round, env) => go({ round, env })} /></div>`;
  }

  function Several({ at }) {
    const query = new URLSearchParams(at.getAll("compare").map((id) => ["id", id]));
    const [told, fault] = useLive(`/api/compare?${query}`, "/api/live");
    if (!told) return html`<${Fault} text=${fault} />`;
    return html`<div><${Fault} text=${fault} /><${Comparison} lines=${told.lines} told=${told} /></div>`;
  }

  function App() {
    const [at, move] = useState(address());
    useEffect(() => {
      const moved = () => move(address());
      addEventListener("hashchange", moved);
      return () => removeEventListener("hashchange", moved);
    }, []);
    const page = at.get("run") != null ? html`<${One} key=${at.get("run")} at=${at} />` : at.get("compare") != null ? html`<${Several} at=${at} />` : html`<${List} />`;
    return html`<a class="skip" href="#main" onClick=${(event) => { event.preventDefault(); document.getElementById("main").focus(); }}>To the content</a>
      <header class="top"><nav aria-label="Main"><a href="#">All runs</a></nav><button type="button" onClick=${darken}>Dark or light</button></header>
      <main id="main" tabindex="-1">${page}</main>`;
  }

  function darken() {
    const root = document.documentElement, dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
  }

  const root = document.getElementById("app");
  root.textContent = "";
  render(html`<${App} />`, root);
})();
