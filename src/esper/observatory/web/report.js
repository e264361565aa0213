/* The report: the page of one run, with its data in the same file. */
"use strict";
htmPreact.render(
  htmPreact.html`<main id="main"><${EsperViews.Page} data=${JSON.parse(document.getElementById("data").textContent)} /></main>`,
  document.getElementById("app"),
);
