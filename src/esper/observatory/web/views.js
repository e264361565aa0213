/* The views of a run, shared by the web page (app.js) and the report (report.js).
 *
 * Plain scripts, no build step: vendor/htm-preact.umd.js provides `html` and hooks, vendor/uPlot draws curves.
 * All views are functions of the data that observatory/describe.py makes; nothing is fetched.
 * Text becomes text nodes and attributes, never markup.
 *
 *   the network   Network, Lanes, Player   modules in order, their seeds, a slider through the epochs
 *   curves        Plot                     uPlot in a component; plots with one `group` zoom together
 *   tables        Table, Cards, Feed
 *   pages         RunPage, Comparison; Page chooses (the page of an evaluation is in evaluation.js)
 */
"use strict";
const EsperViews = (() => {
  const { html, useState, useEffect, useRef, useMemo } = htmPreact;

  // --- numbers ------------------------------------------------------------------------------------

  const fixed = (digits) => (value) => (value == null ? "–" : value.toLocaleString("en-GB", { minimumFractionDigits: digits, maximumFractionDigits: digits }));
  const count = fixed(0), score = fixed(1), fine = fixed(2);
  const signed = (value, digits = 2) => (value == null ? "–" : (value < 0 ? "−" : value > 0 ? "+" : "") + fixed(digits)(Math.abs(value)));
  const short = (value) => (value == null ? "–" : Math.abs(value) >= 1000 ? count(value) : String(Number(value.toPrecision(4))));
  const big = (value) => {
    if (value == null) return "–";
    const [scale, unit] = value >= 1e12 ? [1e12, "T"] : value >= 1e9 ? [1e9, "G"] : value >= 1e6 ? [1e6, "M"] : [1, ""];
    return short(value / scale) + unit;
  };
  const clock = (seconds) => {
    if (seconds == null) return "–";
    const whole = Math.round(seconds), hours = Math.floor(whole / 3600), minutes = Math.floor(whole / 60) % 60;
    return (hours ? hours + ":" + String(minutes).padStart(2, "0") : minutes) + ":" + String(whole % 60).padStart(2, "0");
  };
  const cut = (text, longest) => (text.length > longest ? text.slice(0, longest - 1) + "…" : text);
  const low = (text) => String(text).toLowerCase();
  let stages = { colours: {}, letters: {}, names: {} };  // Page sets it from its data
  const stageName = (stage) => stages.names[stage] || low(stage);

  // --- the network --------------------------------------------------------------------------------

  const ROW = 92, TRUNK = 92, SEED = 236, RAIL = 430, TOP = 62;
  const holdsSeed = (stage) => !["DORMANT", "EMBARGOED", "RESETTING", null, undefined].includes(stage);

  function slotInWords(module, [stage, blueprint, alpha, contribution]) {
    if (!holdsSeed(stage)) return `${module}: ${stageName(stage)}`;
    const worth = contribution == null ? "" : `, contribution ${signed(contribution, 1)} points`;
    return `${module}: ${blueprint} ${stageName(stage)}, alpha ${fine(alpha)}${worth}`;
  }

  /** The network at one epoch: the trunk goes down, seeds hang on its right. */
  function Network({ episode, at }) {
    const frame = episode.frames[at];
    if (!frame) return html`<p class="quiet">No epoch has ended yet.</p>`;
    const bottom = TOP + ROW * episode.modules.length;
    const words = frame.slots.map((slot, i) => slotInWords(episode.modules[i], slot)).join("; ");
    return html`<svg class="network" viewBox="0 0 452 ${bottom + 50}" role="img" aria-label=${`Network at epoch ${frame.step}. ${words}`}>
      <path class="trunk" d="M${TRUNK} 40 V${bottom + 6}" />
      <${End} y=${12} text="input" />
      ${episode.modules.map((module, i) => html`<${Module} key=${i} y=${TOP + i * ROW} bottom=${bottom} module=${module} slot=${frame.slots[i]} />`)}
      <${End} y=${bottom + 6} text="output" />
    </svg>`;
  }

  const End = ({ y, text }) => html`<g>
    <rect class="end" x=${TRUNK - 46} y=${y} width="92" height="30" rx="15" />
    <text x=${TRUNK} y=${y + 20} text-anchor="middle" font-size="14">${text}</text>
  </g>`;

  function Module({ y, bottom, module, slot }) {
    const [stage, blueprint, alpha, contribution] = slot;
    const join = y + 62, seedY = y + 46;  // where a seed adds to the trunk; where it stands
    return html`<g>
      <rect class="module" x=${TRUNK - 76} y=${y} width="152" height="38" rx="7" />
      <text x=${TRUNK} y=${y + 24} text-anchor="middle" font-size="14"><title>${module}</title>${cut(module, 18)}</text>
      ${holdsSeed(stage)
        ? html`<${Seed} y=${seedY} join=${join} bottom=${bottom} stage=${stage} blueprint=${blueprint} alpha=${alpha} contribution=${contribution} />`
        : html`<g>
            <circle class="empty" cx=${SEED} cy=${seedY} r="13" />
            <text class="quiet" x=${SEED + 30} y=${seedY + 5} font-size="13">${stageName(stage)}</text>
          </g>`}
    </g>`;
  }

  /** Reads from the trunk; adds to it, or to the output if it is a branch, as strongly as alpha. */
  function Seed({ y, join, bottom, stage, blueprint, alpha, contribution }) {
    const colour = stages.colours[stage] || stages.colours.EMBARGOED, kept = stage === "FOSSILIZED", gone = stage === "CULLED";
    const radius = stage === "GERMINATED" ? 11 : 17, around = 2 * Math.PI * (radius + 5);
    const branch = String(blueprint).startsWith("branch");
    const adds = branch
      ? `M${SEED} ${y + radius} V${y + 28} Q${SEED} ${y + 36} ${SEED + 8} ${y + 36} H${RAIL - 10} Q${RAIL} ${y + 36} ${RAIL} ${y + 46} V${bottom + 11} Q${RAIL} ${bottom + 21} ${RAIL - 10} ${bottom + 21} H${TRUNK + 48}`
      : `M${SEED} ${y + radius} Q${SEED} ${join + 16} ${SEED - 40} ${join + 16} H${TRUNK}`;
    const strength = gone ? 0 : alpha || 0;
    return html`<g>
      <path class="wire" d="M${TRUNK + 76} ${y - 27} H${SEED - 22} Q${SEED} ${y - 27} ${SEED} ${y - radius}" stroke=${colour} stroke-width="2" stroke-dasharray=${kept ? "none" : "2 5"} />
      <path class="wire" d=${adds} stroke=${colour} stroke-width=${1 + 5 * strength} opacity=${strength > 0 ? 1 : 0} />
      ${kept
        ? html`<rect class="seed" x=${SEED - radius} y=${y - radius} width=${2 * radius} height=${2 * radius} rx="6" fill=${colour} />`
        : html`<circle class="seed" cx=${SEED} cy=${y} r=${radius} fill=${colour} />
               <circle class="ring" cx=${SEED} cy=${y} r=${radius + 5} stroke-dasharray=${`${around * strength} ${around}`} transform=${`rotate(-90 ${SEED} ${y})`} />`}
      <${Letter} x=${SEED} y=${y + 5} colour=${colour} letter=${stages.letters[stage]} />
      <text x=${SEED + 30} y=${y - 8} font-size="14" font-weight="600"><title>${blueprint}</title>${cut(String(blueprint), 18)}</text>
      <text class="quiet" x=${SEED + 30} y=${y + 8} font-size="12.5">${stageName(stage)}${kept || gone ? "" : `, α ${fine(alpha)}`}</text>
      <text x=${SEED + 30} y=${y + 23} font-size="12.5">${contribution == null ? "" : `${signed(contribution, 1)} points`}</text>
    </g>`;
  }

  /** A letter that can be read on its colour. */
  function Letter({ x, y, colour, letter }) {
    const [r, g, b] = [1, 3, 5].map((i) => parseInt(colour.slice(i, i + 2), 16));
    return html`<text class="letter" x=${x} y=${y} font-size="14" style=${{ fill: 0.299 * r + 0.587 * g + 0.114 * b > 140 ? "#111" : "#fff" }}>${letter}</text>`;
  }

  /** One line per slot: its stages under the epochs of the curve above. */
  function Lanes({ episode, at, range }) {
    const [from, to] = range || bounds(episode);
    const blocks = useMemo(() => episode.modules.map((_, i) => stageBlocks(episode.frames, i)), [episode]);
    const now = episode.frames[at] && episode.frames[at].step;
    const width = Math.max(to - from, 1e-9);
    return html`<div class="lanes">
      ${episode.modules.map((module, i) => html`<div class="lane" key=${i}>
        <span class="label name">${module}</span>
        <svg viewBox="0 0 1000 16" preserveAspectRatio="none" role="img" aria-label=${laneInWords(module, blocks[i])}>
          <rect class="slotless" x="0" y="6" width="1000" height="4" />
          ${blocks[i].filter((block) => stages.colours[block.stage]).map((block) => {
            const left = Math.max(0, (1000 * (block.from - 0.5 - from)) / width), right = Math.min(1000, (1000 * (block.to + 0.5 - from)) / width);
            return right > left && html`<rect x=${left} y="0" width=${right - left} height="16" fill=${stages.colours[block.stage]}><title>${`${block.blueprint || ""} ${stageName(block.stage)}, epochs ${block.from} to ${block.to}`}</title></rect>`;
          })}
          ${now >= from && now <= to && html`<rect class="now" x=${(1000 * (now - from)) / width - 1} y="0" width="2.5" height="16" />`}
        </svg>
      </div>`)}
    </div>`;
  }

  const bounds = (episode) => (episode.frames.length ? [episode.frames[0].step, Math.max(episode.frames[0].step + 1, episode.frames[episode.frames.length - 1].step)] : [0, 1]);

  function stageBlocks(frames, slot) {
    const blocks = [];
    for (const frame of frames) {
      const [stage, blueprint] = frame.slots[slot], last = blocks[blocks.length - 1];
      if (last && last.stage === stage) last.to = frame.step;
      else blocks.push({ stage, blueprint, from: frame.step, to: frame.step });
    }
    return blocks;
  }
  const laneInWords = (module, blocks) => `${module}: ` + (blocks.filter((b) => b.stage !== "DORMANT").map((b) => `${stageName(b.stage)} ${b.from} to ${b.to}`).join(", ") || "empty throughout");

  function StageKeys({ episode }) {
    const seen = new Set(episode.frames.flatMap((frame) => frame.slots.map((slot) => stageName(slot[0]))));
    const byName = new Map(Object.keys(stages.colours).map((stage) => [stageName(stage), stage]));
    return html`<ul class="keys">${[...byName].filter(([name]) => seen.has(name)).map(([name, stage]) => html`<li key=${name}>
      <svg viewBox="0 0 12 12" aria-hidden="true"><rect width="12" height="12" rx="2" fill=${stages.colours[stage]} /></svg>${stages.letters[stage]} ${name}</li>`)}</ul>`;
  }

  /** A slider through the epochs that can also play. */
  function Player({ episode, at, seek, playing, play }) {
    const last = episode.frames.length - 1;
    useEffect(() => {
      if (!playing) return undefined;
      const timer = setTimeout(() => (at < last ? seek(at + 1) : play(false)), Math.max(60, Math.min(450, 12000 / (last + 1))));
      return () => clearTimeout(timer);
    }, [playing, at, last]);
    if (last < 0) return null;
    return html`<div class="player">
      <button type="button" aria-pressed=${playing ? "true" : "false"} onClick=${() => { if (!playing && at >= last) seek(0); play(!playing); }}>${playing ? "Pause" : "Play"}</button>
      <input type="range" min="0" max=${last} value=${at} aria-label="Epoch" aria-valuetext=${`epoch ${episode.frames[at].step}`} onInput=${(event) => { play(false); seek(Number(event.target.value)); }} />
      <output>epoch ${episode.frames[at].step}</output>
    </div>`;
  }

  // --- curves -------------------------------------------------------------------------------------

  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const HUES = ["--ink", "--accent", "--bad", "--good", "--quiet"];
  const WHOLE = [1, 10, 100, 1e3, 1e4, 1e5, 1e6, 1e7].flatMap((n) => [n, 2 * n, 5 * n]);
  const DASHES = [[], [7, 4], [2, 4], [9, 3, 2, 3], [1, 3]];

  /** series: [{label, y}] over x. `now` is marked, `zoomed` is called with the range of x, values below `lowest` are out of view. */
  function Plot({ title, x, series, height = 220, now, group, zoomed, lowest, over = "epoch" }) {
    const box = useRef(null), plot = useRef(null), mark = useRef(now);
    const theme = useTheme();
    mark.current = now;
    const shape = series.map((line) => line.label).join("\u0000");
    useEffect(() => {
      const options = {
        width: Math.max(220, box.current.clientWidth), height,
        padding: [10, 12, 0, 0],
        cursor: group ? { sync: { key: group, setSeries: false }, drag: { x: true, y: false } } : { drag: { x: true, y: false } },
        scales: { x: { time: false }, ...(lowest == null ? {} : { y: { range: (_, from, to) => uPlot.rangeNum(Math.max(from, lowest), to, 0.1, true) } }) },
        legend: { show: series.length > 1 },
        axes: [
          { stroke: css("--quiet"), grid: { stroke: css("--line"), width: 1 }, ticks: { stroke: css("--line"), width: 1 }, incrs: WHOLE },
          { stroke: css("--quiet"), grid: { stroke: css("--line"), width: 1 }, ticks: { stroke: css("--line"), width: 1 }, size: 50, values: (_, ticks) => ticks.map((tick) => (tick == null ? "" : Math.abs(tick) >= 1e5 ? tick.toExponential(0) : String(Number(tick.toPrecision(5))))) },
        ],
        series: [{ label: over }, ...series.map((line, i) => ({
          label: line.label, stroke: css(HUES[i % HUES.length]), width: i ? 1.4 : 2, dash: DASHES[i % DASHES.length], spanGaps: true,
          points: { show: x.length < 40 && !i, size: 5 }, value: (_, value) => short(value),
        }))],
        hooks: {
          ready: [(u) => readLegend(u, mark.current)],
          draw: [(u) => {
            if (mark.current == null) return;
            const left = u.valToPos(mark.current, "x", true);
            if (left < u.bbox.left || left > u.bbox.left + u.bbox.width) return;
            u.ctx.fillStyle = css("--accent");
            u.ctx.fillRect(left - 1, u.bbox.top, 2 * devicePixelRatio, u.bbox.height);
          }],
          setScale: [(u, key) => {
            if (key !== "x" || u.scales.x.min == null) return;
            box.current.dataset.range = `${u.scales.x.min} ${u.scales.x.max}`;
            if (zoomed) zoomed([u.scales.x.min, u.scales.x.max]);
          }],
        },
      };
      const drawn = new uPlot(options, [x, ...series.map((line) => line.y)], box.current);
      plot.current = drawn;
      const watcher = new ResizeObserver(() => drawn.setSize({ width: Math.max(220, box.current.clientWidth), height }));
      watcher.observe(box.current);
      return () => { watcher.disconnect(); drawn.destroy(); plot.current = null; };
    }, [shape, theme, group, height]);
    useEffect(() => { if (plot.current) plot.current.setData([x, ...series.map((line) => line.y)], !isZoomed(plot.current)); }, [x, series]);
    useEffect(() => {
      if (!plot.current) return;
      plot.current.redraw(false);
      readLegend(plot.current, now);
    }, [now, x, shape, theme]);
    return html`<figure class="plot" aria-label=${`${title}: ${inWords(series)}`} role="group"><h3>${title}</h3><div ref=${box}></div></figure>`;
  }

  /** The legend shows the values at `now` until the pointer shows others. */
  function readLegend(plot, now) {
    const idx = now == null ? -1 : plot.data[0].indexOf(now);
    if (idx >= 0) plot.setLegend({ idx });
  }

  function isZoomed(plot) {
    const x = plot.data[0];
    return x.length > 1 && (plot.scales.x.min > x[0] || plot.scales.x.max < x[x.length - 1]);
  }

  function inWords(series) {
    return series.map((line) => {
      const measured = line.y.filter((value) => value != null);
      return measured.length ? `${line.label} from ${short(measured[0])} to ${short(measured[measured.length - 1])}, at most ${short(Math.max(...measured))}` : `${line.label} not measured`;
    }).join("; ");
  }

  function useTheme() {
    const [theme, change] = useState(0);
    useEffect(() => {
      const media = matchMedia("(prefers-color-scheme: dark)"), redraw = () => change((n) => n + 1);
      media.addEventListener("change", redraw);
      const watcher = new MutationObserver(redraw);
      watcher.observe(document.documentElement, { attributes: true, attributeFilter: ["data-theme"] });
      return () => { media.removeEventListener("change", redraw); watcher.disconnect(); };
    }, []);
    return theme;
  }

  /** Curves over the union of their x. */
  function joined(curves) {
    const x = [...new Set(curves.flatMap((curve) => curve.x.filter((value) => value != null)))].sort((a, b) => a - b);
    const place = new Map(x.map((value, i) => [value, i]));
    const series = curves.map((curve) => {
      const y = new Array(x.length).fill(null);
      curve.x.forEach((value, i) => { if (value != null) y[place.get(value)] = curve.y[i]; });
      return { label: curve.label, y };
    });
    return { x, series };
  }

  // --- tables -------------------------------------------------------------------------------------

  const Table = ({ head, rows, caption }) => html`<div class="scroll" tabindex="0" role="region" aria-label=${caption}><table>
    <caption class="hidden">${caption}</caption>
    <thead><tr>${head.map((cell) => html`<th scope="col">${cell}</th>`)}</tr></thead>
    <tbody>${rows.map((row) => html`<tr>${row.map((cell, i) => (i ? html`<td>${cell}</td>` : html`<th scope="row" class="name">${cell}</th>`))}</tr>`)}</tbody>
  </table></div>`;

  const Cards = ({ items }) => html`<ul class="cards">${items.filter(([, value]) => value != null).map(([label, value]) => html`<li key=${label}><b class="name">${value}</b><span>${label}</span></li>`)}</ul>`;

  function Feed({ events, seek }) {
    const topics = [...new Set(events.map((event) => event.topic))];
    const [hidden, hide] = useState({});
    if (!events.length) return null;
    const shown = events.filter((event) => !hidden[event.topic]);
    return html`<section><h2>Events</h2>
      <div class="filters">${topics.map((topic) => html`<button type="button" key=${topic} aria-pressed=${hidden[topic] ? "false" : "true"} onClick=${() => hide({ ...hidden, [topic]: !hidden[topic] })}>${topic}</button>`)}</div>
      <ul class="feed" tabindex="0" aria-label="Events">${shown.map((event, i) => html`<li key=${i}><span class="quiet">epoch ${event.step}</span><span class="name">${event.text}</span></li>`)}</ul>
    </section>`;
  }

  const Faults = ({ run, faults }) => {
    const shown = [run.why, ...(faults || [])].filter((text, i, all) => text && all.indexOf(text) === i && !(i && all[0].includes(text)));
    return shown.length ? html`<div class="fault" role="status">${shown.map((text) => html`<p class="name">${text}</p>`)}</div>` : null;
  };

  const State = ({ run }) => html`<span class=${`state state-${run.state}`}>${run.state}</span>`;

  function Heading({ run, sub }) {
    const when = run.updated ? new Date(run.updated * 1000).toLocaleString("en-GB") : null;
    const progress = run.done == null ? "" : `, ${count(run.done)}${run.total == null ? "" : ` of ${count(run.total)}`} ${run.unit}`;
    return html`<h1 class="name">${run.name}</h1>
      <p class="wide"><${State} run=${run} />${progress}${run.left == null ? "" : `, about ${clock(run.left)} left`}${sub ? `, ${sub}` : ""}${when ? html`<span class="quiet">, last change ${when}</span>` : ""}</p>`;
  }

  // --- pages --------------------------------------------------------------------------------------

  /** epoch: the position of the slider, or null for the newest; onEpoch is called when it changes. */
  function RunPage({ data, epoch, onEpoch, onEnvironment }) {
    const { run, episode } = data, last = Math.max(0, episode.frames.length - 1);
    const [own, setOwn] = useState(null), [playing, play] = useState(false), [range, zoom] = useState(null);
    const wanted = epoch !== undefined ? epoch : own;
    const at = wanted == null ? last : nearest(episode.frames, wanted);
    const seek = (i) => { const step = episode.frames[i].step; setOwn(step); if (onEpoch) onEpoch(step); };
    const now = episode.frames[at];
    const training = data.rounds && data.rounds.round.length > 0;
    const which = training ? `environment ${episode.env} in round ${episode.round}` : null;
    return html`<div>
      <${Heading} run=${run} sub=${[run.task, run.controller, run.key == null ? null : `key ${run.key}`].filter(Boolean).join(", ")} />
      <${Faults} run=${run} faults=${data.faults} />
      <${Cards} items=${[
        ["test score", run.test_score == null ? null : score(run.test_score)],
        ["validation score", run.val_score == null ? null : score(run.val_score)],
        ["parameters", run.params == null ? null : count(run.params)],
        ["seeds kept", training || data.outcome.fossilized == null ? null : `${count(data.seeds.length)} of ${count(data.outcome.germinated)}`],
        ["speed", data.timing && data.timing.steps_per_second ? `${Number(data.timing.steps_per_second.toPrecision(2))} steps/s` : null],
      ]} />
      <section aria-label="Network"><h2>Network${which ? `: ${which}` : ""}</h2>
        <${Player} episode=${episode} at=${at} seek=${seek} playing=${playing} play=${play} />
        <div class="two">
          <div class="panel"><${Network} episode=${episode} at=${at} /><${StageKeys} episode=${episode} /></div>
          <div class="panel">
            <${Score} data=${data} now=${now ? now.step : null} zoom=${zoom} />
            <${Lanes} episode=${episode} at=${at} range=${range} />
          </div>
        </div>
      </section>
      ${training && html`<${Environments} data=${data} open=${onEnvironment} />`}
      ${training && html`<${Policy} data=${data} />`}
      <${Compared} data=${data} />
      <${Seeds} data=${data} />
      <${Decisions} data=${data} />
      <${Feed} events=${episode.events} />
      ${data.cost.length > 0 && html`<section><h2>Cost</h2><${Table} caption="Cost" head=${["what", "multiply-adds"]} rows=${data.cost.map(([what, macs]) => [what, big(macs)])} /></section>`}
      <${Repeat} data=${data} />
      <${Quantities} quantities=${data.quantities} />
    </div>`;
  }

  function nearest(frames, step) {
    let best = 0;
    frames.forEach((frame, i) => { if (Math.abs(frame.step - step) < Math.abs(frames[best].step - step)) best = i; });
    return best;
  }

  function Score({ data, now, zoom }) {
    const { episode } = data;
    const { x, series } = useMemo(() => joined([
      { label: data.compared.length ? "grown" : "validation", x: episode.frames.map((f) => f.step), y: episode.frames.map((f) => f.val_score) },
      ...data.compared.map((curve) => ({ label: curve.label, x: curve.x, y: curve.y })),
      ...(data.compared.length ? [] : [{ label: "training", x: episode.frames.map((f) => f.step), y: episode.frames.map((f) => f.train_score) }]),
    ]), [data]);
    // The low scores of the first tenth are out of view.
    const later = episode.frames.slice(Math.floor(episode.frames.length / 10)).map((f) => f.val_score).filter((value) => value != null);
    const lowest = later.length > 5 ? Math.min(...later) : null;
    return html`<${Plot} title="Validation score" x=${x} series=${series} now=${now} group="host" zoomed=${zoom} lowest=${lowest} height=${250} />`;
  }

  /** open(round, env) shows another network; in a report there is none to open. */
  function Environments({ data, open }) {
    const { round, env } = data.episode;
    return html`<section><h2>Environments of round ${round}</h2>
      ${open && data.last_round > 0 && html`<div class="player"><label for="round">Round</label><input id="round" type="range" min="0" max=${data.last_round} value=${round} onChange=${(event) => open(Number(event.target.value), env)} /><output>${round} of ${data.last_round}</output></div>`}
      <ul class="environments">
      ${data.environments.map((one) => html`<li key=${one.env}><button type="button" aria-pressed=${one.env === env ? "true" : "false"} disabled=${!open} onClick=${() => open(round, one.env)}>
        ${one.env}: score ${score(one.val_score)}<br /><span>${one.ended ? `return ${signed(one.return)}` : `epoch ${one.step}`}</span>
        <span class="cells">${one.stages.map((stage) => html`<svg viewBox="0 0 16 16" role="img" aria-label=${stageName(stage)}><rect width="16" height="16" rx="3" fill=${stages.colours[stage] || "var(--line)"} /></svg>`)}</span>
      </button></li>`)}</ul></section>`;
  }

  const PLOTS = [
    ["Return", ["return"]], ["Score", ["val_score", "validation_hosts_score"]],
    ["Entropy of each head", ["op_entropy", "slot_entropy", "blueprint_entropy", "blend_entropy"]],
    ["KL", ["approx_kl"]], ["Clip fraction", ["clip_fraction"]], ["Explained variance", ["explained_variance"]],
    ["Gradient norms", ["grad_norm", "op_grad_norm", "slot_grad_norm", "blueprint_grad_norm", "value_grad_norm"]],
    ["Seeds per episode", ["germinated", "fossilized", "culled"]],
  ];

  function Policy({ data }) {
    const { rounds, quantities, policy } = data;
    const plots = useMemo(() => PLOTS.map(([title, names]) => [title, names.filter((name, i) => !i || rounds[name].some((value) => value != null)).map((name) => ({ label: quantities[name][0], y: rounds[name] }))]), [data]);
    const alarms = rounds.round.map((n, i) => [n, rounds.anomalies[i]]).filter(([, what]) => what);
    return html`<section><h2>Policy</h2>
      ${alarms.length > 0 && html`<div class="fault"><p>Anomalies in ${alarms.length} of the rounds shown; the latest: ${alarms[alarms.length - 1][1]} (round ${alarms[alarms.length - 1][0]}).</p></div>`}
      <div class="plots">${plots.map(([title, series]) => html`<${Plot} key=${title} title=${title} x=${rounds.round} series=${series} height=${150} group="rounds" over="round" />`)}</div>
      ${policy && html`<${Actions} policy=${policy} />`}
    </section>`;
  }

  /** Actions of the policy, counted over the latest rounds. */
  function Actions({ policy }) {
    const total = policy.steps.map((_, i) => Object.values(policy.ops).reduce((sum, of) => sum + of[i], 0));
    const series = Object.entries(policy.ops).filter(([op]) => op !== "WAIT").map(([op, of]) => ({ label: low(op), y: of.map((n, i) => (100 * n) / total[i]) }));
    return html`<div><h2>Actions (rounds ${policy.rounds[0]} to ${policy.rounds[1]})</h2>
      <div class="plots">
        <${Plot} title="Share of environments with an action, % by epoch" x=${policy.steps} series=${series} height=${180} />
        <div><h3>Blueprints</h3><${Table} caption="Blueprints planted" head=${["blueprint", "times"]} rows=${policy.blueprints} /></div>
        <div><h3>Slots</h3><${Table} caption="Slots planted in" head=${["slot", "times"]} rows=${policy.slots} /></div>
      </div></div>`;
  }

  const Compared = ({ data }) => data.arms.length > 0 && html`<section><h2>Comparison</h2>
    <${Table} caption="Arms" head=${["on test data", "score", "parameters", "multiply-adds"]} rows=${data.arms.map((arm) => [arm.arm, score(arm.test_score), count(arm.params), count(arm.macs)])} /></section>`;

  /** Probabilities and values of a learned policy before each epoch. Training runs do not record them. */
  function Decisions({ data }) {
    const { decisions } = data.episode;
    if (!decisions.length) return null;
    const parts = (list) => list.map(([name, p]) => (p == null ? name : `${name} ${fine(p)}`)).join(", ") || "–";
    return html`<section><h2>Decisions of the policy</h2>
      <${Table} caption="Decisions of the policy" head=${["before epoch", "action with probabilities", "value", "second choice"]} rows=${decisions.map((one) => [one.step, parts(one.action), signed(one.value), parts(one.second)])} />
    </section>`;
  }

  const Seeds = ({ data }) => data.seeds.length > 0 && html`<section><h2>Kept seeds</h2>
    <${Table} caption="Kept seeds" head=${["seed", "parameters", "contribution", "Shapley value"]}
      rows=${data.seeds.map((seed) => [`${seed.blueprint} in ${seed.module} (${seed.slot_id})`, count(seed.params), signed(seed.contribution), signed(seed.shapley) + (seed.shapley_error == null ? "" : ` ± ${fine(seed.shapley_error)}`)])} />
    <p class="quiet">In points of the validation score.</p></section>`;

  const Repeat = ({ data }) => html`<section>
    ${data.reproduce && html`<div><h2>Command to repeat it</h2><pre tabindex="0">${data.reproduce}</pre></div>`}
    ${data.settings && data.settings.length > 0 && html`<details><summary>All settings</summary><${Table} caption="Settings" head=${["setting", "value"]} rows=${data.settings.map(([name, value]) => [name, html`<span class="name">${String(value)}</span>`])} /></details>`}
  </section>`;

  const Quantities = ({ quantities }) => html`<details><summary>What the quantities mean</summary>
    <${Table} caption="Quantities" head=${["quantity", "meaning", "bad"]} rows=${Object.values(quantities).map(([label, meaning, bad]) => [label, html`<span class="left">${meaning}</span>`, bad])} /></details>`;

  /** Several runs in one plot. */
  function Comparison({ data }) {
    const { runs } = data;
    const over = [...new Set(data.curves.map((curve) => curve.over))];
    const plots = useMemo(() => over.map((unit) => [unit, joined(data.curves.filter((curve) => curve.over === unit).map((curve) => ({ label: curve.name, x: curve.x, y: curve.y })))]), [data]);
    return html`<div><h1>${runs.length} runs compared</h1>
      ${plots.map(([unit, { x, series }]) => html`<div class="panel below" key=${unit}><${Plot} title=${`Validation score by ${unit}`} x=${x} series=${series} height=${300} over=${unit} group=${`compare-${unit}`} /></div>`)}
      <h2>Outcomes</h2><${Table} caption="Outcomes" head=${["run", "state", "validation", "test", "parameters"]} rows=${runs.map((run) => [run.name, run.state, score(run.val_score), score(run.test_score), count(run.params)])} />
      <h2>On the same keys</h2>
      ${data.pairs.length ? html`<${Table} caption="Paired differences" head=${["difference of validation score", "keys", "mean", "± standard error"]} rows=${data.pairs.map((pair) => [`${pair.a} − ${pair.b}`, count(pair.n), signed(pair.mean), fine(pair.error)])} />`
        : html`<p class="quiet">No two of these runs share a key.</p>`}
    </div>`;
  }

  const views = { Comparison, RunPage, Heading, Faults, Repeat, State, Table, big, count, cut, fine, score, short, signed };
  // evaluation.js adds the page of an evaluation.
  views.Page = (props) => {
    stages = props.data.stages;
    return props.data.run.kind === "evaluation" ? html`<${views.EvaluationPage} ...${props} />` : html`<${RunPage} ...${props} />`;
  };
  return views;
})();
