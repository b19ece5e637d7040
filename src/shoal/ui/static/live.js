/* Asks every two seconds whether the page's files have changed, and replaces the sections that have. */
"use strict";

(() => {
  const EVERY = 2000;
  const { source } = document.body.dataset;
  let { stamp } = document.body.dataset;
  const page = document.getElementById("page");
  const connection = document.getElementById("connection");
  if (!source) return;

  function say(words, kind) {
    if (connection.textContent === words) return;
    connection.textContent = words;
    connection.className = kind;
  }

  /* What the reader has opened, ticked or focused stays so. */
  function replace(old, next) {
    const open = [...old.querySelectorAll("details[open]")].map((one) => one.id);
    const ticked = [...old.querySelectorAll("input:checked")].map((one) => one.value);
    const focused = old.contains(document.activeElement) ? document.activeElement : null;
    old.replaceWith(next);
    for (const one of next.querySelectorAll("details")) if (open.includes(one.id)) one.open = true;
    for (const one of next.querySelectorAll("input[type=checkbox]")) one.checked = ticked.includes(one.value);
    if (!focused) return;
    const again = focused.id ? document.getElementById(focused.id)
      : [...next.querySelectorAll(focused.tagName)].find((one) => one.textContent === focused.textContent);
    if (again) again.focus({ preventScroll: true });
  }

  function show(sections) {
    let before = null; // the section after which the next one belongs
    const kept = new Set();
    for (const html of sections) {
      const holder = document.createElement("template");
      holder.innerHTML = html;
      const next = holder.content.firstElementChild;
      kept.add(next.id);
      const old = next.id && document.getElementById(next.id);
      if (old) {
        if (next.hasAttribute("data-live") && old.outerHTML !== next.outerHTML) replace(old, next);
        before = document.getElementById(next.id);
      } else if (next.id) {
        if (before) before.after(next); else page.prepend(next);
        before = next;
      }
    }
    for (const one of page.querySelectorAll(":scope > [data-live]")) if (!kept.has(one.id)) one.remove();
  }

  async function ask() {
    if (document.hidden) return;
    const answer = await fetch(source, { headers: { "X-Known": stamp || "" } });
    if (answer.status === 404) { say("The run is gone", "lost"); return; }
    if (!answer.ok) throw new Error(String(answer.status));
    if (answer.status === 200) {
      const found = await answer.json();
      stamp = found.stamp;
      show(found.sections);
      shoal.setCharts(found.charts);
    }
    say("live", "live");
  }

  async function repeat() {
    try { await ask(); } catch { say("The server does not answer", "lost"); }
    setTimeout(repeat, EVERY);
  }
  setTimeout(repeat, EVERY);
  say("live", "live");
})();
