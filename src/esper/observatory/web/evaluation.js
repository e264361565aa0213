/* The page of an evaluation: differences with intervals, score against cost, tables.
 *
 * Shared by the web page and the report; it adds its page to views.js and uses the helpers there.
 */
"use strict";
(() => {
  const { html } = htmPreact;
  const { Heading, Faults, Repeat, Table, big, count, cut, fine, score, short, signed } = EsperViews;

  function ticks(low_, high, wanted = 6) {
    const span = Math.max(high - low_, 1e-9), raw = span / wanted, power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 5, 10].map((f) => f * power).find((s) => s >= raw);
    const marks = [];
    for (let mark = Math.ceil(low_ / step) * step; mark <= high + 1e-9 * span; mark += step) marks.push(Number(mark.toPrecision(8)));
    return marks;
  }

  /** Mean paired differences with their intervals. */
  function Forest({ rows, what }) {
    const ends = rows.flatMap((row) => [row.mean, row.low, row.high]).filter((value) => value != null).concat(0);
    const pad = 0.08 * (Math.max(...ends) - Math.min(...ends) || 1), from = Math.min(...ends) - pad, to = Math.max(...ends) + pad;
    const x = (value) => 290 + (400 * (value - from)) / (to - from), bottom = 34 * rows.length + 14;
    return html`<svg class="chart" viewBox=${`0 0 800 ${bottom + 44}`} role="img" aria-label=${rows.map((row) => `${row.arm} minus ${row.versus}: ${signed(row.mean)}, from ${signed(row.low)} to ${signed(row.high)}`).join("; ")}>
      ${ticks(from, to).map((mark) => html`<g key=${mark}><path class="grid" d=${`M${x(mark)} 4 V${bottom}`} /><text class="quiet" x=${x(mark)} y=${bottom + 16} text-anchor="middle" font-size="12">${signed(mark, 1)}</text></g>`)}
      <path class="axis" d=${`M${x(0)} 4 V${bottom}`} />
      ${rows.map((row, i) => {
        const y = 24 + 34 * i, significant = row.p_holm != null && row.p_holm < 0.05, mark = significant ? (row.mean > 0 ? "good" : "bad") : "open";
        return html`<g key=${i}><text x="282" y=${y + 4} text-anchor="end" font-size="13"><title>${`${row.arm} − ${row.versus}`}</title>${cut(`${row.arm} − ${row.versus}`, 42)}</text>
          ${row.low != null && html`<path class=${mark} d=${`M${x(row.low)} ${y} H${x(row.high)}`} stroke-width="3" />`}
          <circle class=${mark} cx=${x(row.mean)} cy=${y} r="5.5" /><text x="706" y=${y + 4} font-size="13">${signed(row.mean)}${significant ? " *" : ""}</text></g>`;
      })}
      <text class="quiet" x="490" y=${bottom + 36} text-anchor="middle" font-size="12.5">${what}; * p below 0.05 after Holm</text>
    </svg>`;
  }

  /** Score against a cost, one dot per arm, with the Pareto frontier of the fixed networks. */
  function Scatter({ arms, cost, what }) {
    const grows = (arm) => arm.germinated > 0, logs = arms.map((arm) => Math.log10(Math.max(arm[cost], 1)));
    const pad = 0.12 * (Math.max(...logs) - Math.min(...logs) || 1), from = Math.min(...logs) - pad, to = Math.max(...logs) + pad;
    const scores = arms.map((arm) => arm.test_score), high = Math.max(...scores), lowest = Math.min(...scores), margin = 0.14 * (high - lowest || 1);
    const x = (arm) => 56 + (400 * (Math.log10(Math.max(arm[cost], 1)) - from)) / (to - from), y = (value) => 270 - (240 * (value - lowest + margin)) / (high - lowest + 2 * margin);
    const still = arms.filter((arm) => !grows(arm)).sort((a, b) => a[cost] - b[cost] || b.test_score - a.test_score), frontier = [];
    still.forEach((arm) => { if (!frontier.length || arm.test_score > frontier[frontier.length - 1].test_score) frontier.push(arm); });
    const byCost = [...arms].sort((a, b) => a[cost] - b[cost]), cheapest = byCost[0], dearest = byCost[byCost.length - 1];
    const labels = spread(arms.map((arm) => ({ arm, x: x(arm), y: y(arm.test_score) })));
    return html`<svg class="chart" viewBox="0 0 480 310" role="img" aria-label=${`Score against ${what}: ` + arms.map((arm) => `${arm.arm} ${score(arm.test_score)} at ${big(arm[cost])}`).join("; ")}>
      ${ticks(lowest - margin, high + margin, 5).map((mark) => html`<g key=${mark}><path class="grid" d=${`M56 ${y(mark)} H466`} /><text class="quiet" x="50" y=${y(mark) + 4} text-anchor="end" font-size="12">${short(mark)}</text></g>`)}
      <path class="axis" d="M56 270 H466" />
      <path class="frontier" d=${frontier.map((arm, i) => `${i ? "L" : "M"}${x(arm)} ${y(arm.test_score)}`).join(" ")} />
      ${labels.map(({ arm, x: left, y: top, text }) => html`<g key=${arm.arm}>
        ${grows(arm) ? html`<circle class="own" cx=${left} cy=${top} r="6" />` : html`<rect class="open" x=${left - 5} y=${top - 5} width="10" height="10" />`}
        <text x=${left > 320 ? left - 10 : left + 10} y=${text} font-size="11.5" text-anchor=${left > 320 ? "end" : "start"}><title>${`${arm.arm}: ${score(arm.test_score)}, ${big(arm[cost])}`}</title>${cut(arm.arm, 26)}</text></g>`)}
      <text class="quiet" x="260" y="300" text-anchor="middle" font-size="12.5">${what}, logarithmic</text>
      ${[cheapest, dearest].map((arm) => html`<text class="quiet" x=${x(arm)} y="285" font-size="11.5" text-anchor="middle">${big(arm[cost])}</text>`)}
    </svg>`;
  }

  /** Heights for labels that keep them from covering each other. */
  function spread(dots) {
    let last = -Infinity;
    return [...dots].sort((a, b) => a.y - b.y).map((dot) => { const text = Math.max(dot.y + 4, last + 13); last = text; return { ...dot, text }; });
  }

  function EvaluationPage({ data }) {
    const { run, evaluation } = data;
    if (!evaluation) return html`<div><${Heading} run=${run} /><${Faults} run=${run} faults=${data.faults} /></div>`;
    const { arms, comparisons } = evaluation;
    return html`<div>
      <${Heading} run=${run} sub=${[evaluation.task, `${evaluation.steps} epochs`].join(", ")} />
      <${Faults} run=${run} faults=${data.faults} />
      ${comparisons.length > 0 && html`<section><h2>Differences on paired keys</h2><div class="panel scroll" tabindex="0" role="region" aria-label="Forest plot"><${Forest} rows=${comparisons} what=${`difference of test ${evaluation.score}, 95 % interval`} /></div>${data.few_keys && html`<p class="quiet">${data.few_keys}</p>`}</section>`}
      <section><h2>Score against cost</h2><p class="quiet">Circles: networks that grow. Squares: fixed networks; the dashed line is the best of them at each cost.</p><div class="pair">
        <div class="panel"><${Scatter} arms=${arms} cost="params" what="parameters" /></div>
        <div class="panel"><${Scatter} arms=${arms} cost="train_macs" what="multiply-adds of the training" /></div></div></section>
      <section><h2>Arms</h2><${Table} caption="Arms" head=${["arm", `test ${evaluation.score}`, "parameters", "multiply-adds", "training", "planted", "kept", "removed"]}
        rows=${arms.map((arm) => [arm.arm, fine(arm.test_score), count(arm.params), count(arm.macs), big(arm.train_macs), score(arm.germinated), score(arm.fossilized), score(arm.culled)])} /></section>
      ${comparisons.length > 0 && html`<section><h2>Comparisons</h2><${Table} caption="Comparisons" head=${["difference", "mean", "95 % interval", "p (Holm)"]}
        rows=${comparisons.map((row) => [`${row.arm} − ${row.versus}`, signed(row.mean), row.low == null ? "–" : `${signed(row.low)} … ${signed(row.high)}`, row.p_holm == null ? "–" : row.p_holm < 0.001 ? "< 0.001" : row.p_holm.toFixed(3)])} /></section>`}
      <${Repeat} data=${data} />
    </div>`;
  }

  EsperViews.EvaluationPage = EvaluationPage;
})();
