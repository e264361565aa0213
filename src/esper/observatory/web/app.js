/* The page of `esper serve`: the list of runs, addresses and live updates. The views of a run are in views.js.
 *
 *   address   #                                    the list of runs
 *             #run=ID&round=5&env=3&epoch=12       one run or evaluation, one network, one epoch
 *             #compare=ID&compare=ID               several runs in one plot
 *   data      GET /api/runs, /api/run?id=, /api/compare?id=&id=
 *   live      /api/live sends an event when something has changed; the page then fetches its data again
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
    const data = await answer.json();
    if (!answer.ok) throw new Error(data.error || `the server answers ${answer.status}`);
    return data;
  }

  /** [data, fault]: fetched again whenever the server reports a change. */
  function useLive(path, live) {
    const [state, setState] = useState({ path: null, data: null, fault: null });
    useEffect(() => {
      let wanted = true, loading = false, repeat = false;
      const load = async () => {
        if (loading) { repeat = true; return; }
        loading = true;
        try {
          const data = await ask(path);
          if (wanted) setState({ path, data, fault: null });
        } catch (error) {
          if (wanted) setState((before) => ({ ...before, path, fault: error.message }));
        }
        loading = false;
        if (repeat && wanted) { repeat = false; load(); }
      };
      load();
      const source = new EventSource(live);
      source.addEventListener("change", load);
      source.onerror = () => setState((before) => ({ ...before, fault: "no connection to the server; trying again" }));
      source.onopen = () => setState((before) => ({ ...before, fault: null }));
      return () => { wanted = false; source.close(); };
    }, [path, live]);
    return state.path === path || state.data ? [state.data, state.fault] : [null, state.fault];
  }

  const Fault = ({ text }) => text && html`<div class="fault" role="alert"><p>${text}</p></div>`;

  function List() {
    const [runs, fault] = useLive("/api/runs", "/api/live");
    const [words, search] = useState(""), [tags, setTags] = useState([]), [chosen, choose] = useState([]);
    if (!runs) return html`<${Fault} text=${fault} />`;
    const tagsOf = (run) => [run.state, run.kind, run.task].filter(Boolean);
    const all = [...new Set(runs.flatMap(tagsOf))];
    const wanted = words.toLowerCase().split(/\s+/).filter(Boolean);
    const shown = runs.filter((run) => {
      const text = [run.name, run.task, run.controller, run.state, run.kind].join(" ").toLowerCase();
      return wanted.every((word) => text.includes(word)) && tags.every((tag) => tagsOf(run).includes(tag));
    });
    const flip = (list, item) => (list.includes(item) ? list.filter((other) => other !== item) : [...list, item]);
    return html`<div><h1>Runs</h1><${Fault} text=${fault} />
      <div class="tools"><label class="hidden" for="search">Search</label><input id="search" type="search" placeholder="Search" value=${words} onInput=${(event) => search(event.target.value)} />
        <button type="button" disabled=${chosen.length < 2} onClick=${() => { location.hash = link(chosen.map((id) => ["compare", id])); }}>Compare ${chosen.length || ""} selected</button></div>
      <div class="filters">${all.map((tag) => html`<button type="button" key=${tag} aria-pressed=${tags.includes(tag) ? "true" : "false"} onClick=${() => setTags(flip(tags, tag))}>${tag}</button>`)}</div>
      <div class="scroll below" tabindex="0" role="region" aria-label="Runs"><table><caption class="hidden">Runs</caption>
        <thead><tr><th scope="col">run</th><th scope="col" class="left">task, controller</th><th scope="col">validation</th><th scope="col">test</th><th scope="col">parameters</th><th scope="col">done</th><th scope="col">state</th><th scope="col">compare</th></tr></thead>
        <tbody>${shown.map((run) => html`<tr key=${run.id}>
          <th scope="row"><a class="name" href=${link({ run: run.id })}>${run.name}</a></th><td class="left name">${[run.task, run.controller].filter(Boolean).join(", ")}</td>
          <td>${score(run.val_score)}</td><td>${score(run.test_score)}</td><td>${count(run.params)}</td>
          <td>${run.done == null ? "–" : count(run.done) + (run.total == null ? "" : `/${count(run.total)}`)}</td>
          <td><${State} run=${run} /></td>
          <td>${run.kind !== "evaluation" && html`<input type="checkbox" aria-label=${`compare ${run.name}`} checked=${chosen.includes(run.id)} onChange=${() => choose(flip(chosen, run.id))} />`}</td>
        </tr>`)}</tbody></table></div>
      ${!runs.length && html`<p>No runs here yet. <code>esper grow --task digits</code> starts one; it appears here automatically.</p>`}
      ${runs.length > 0 && !shown.length && html`<p>No run matches.</p>`}
    </div>`;
  }

  function One({ at }) {
    const id = at.get("run"), query = new URLSearchParams({ id });
    for (const name of ["round", "env"]) if (at.get(name)) query.set(name, at.get(name));
    const [data, fault] = useLive(`/api/run?${query}`, `/api/live?${new URLSearchParams({ id })}`);
    useEffect(() => { if (data) document.title = `${data.run.name} - Esper`; }, [data]);
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
    const [data, fault] = useLive(`/api/compare?${query}`, "/api/live");
    if (!data) return html`<${Fault} text=${fault} />`;
    return html`<div><${Fault} text=${fault} /><${Comparison} data=${data} /></div>`;
  }

  function App() {
    const [at, move] = useState(address());
    useEffect(() => {
      const moved = () => move(address());
      addEventListener("hashchange", moved);
      return () => removeEventListener("hashchange", moved);
    }, []);
    const page = at.get("run") != null ? html`<${One} key=${at.get("run")} at=${at} />` : at.get("compare") != null ? html`<${Several} at=${at} />` : html`<${List} />`;
    return html`<a class="skip" href="#main" onClick=${(event) => { event.preventDefault(); document.getElementById("main").focus(); }}>Skip to content</a>
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
