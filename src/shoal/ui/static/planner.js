/* Every change of a control asks for the forecast; only the last answer counts. */
"use strict";

(() => {
  const DELAY = 120;
  const form = document.getElementById("planner");
  const results = document.getElementById("results");
  const connection = document.getElementById("connection");
  let timer, asked = null;

  const query = () => new URLSearchParams(new FormData(form)).toString();

  async function plan() {
    if (asked) asked.abort();
    asked = new AbortController();
    results.setAttribute("aria-busy", "true");
    try {
      const answer = await fetch(`/api/plan?${query()}`, { signal: asked.signal });
      const found = await answer.json();
      if (!answer.ok) throw new Error(found.error);
      show(found.sections);
      history.replaceState(null, "", `/plan?${query()}`);
      connection.textContent = "";
    } catch (error) {
      if (error.name === "AbortError") return;
      connection.textContent = "The server does not answer";
      connection.className = "lost";
    }
    results.removeAttribute("aria-busy");
  }

  function show(sections) {
    const holder = document.createElement("template");
    holder.innerHTML = sections.join("");
    results.replaceChildren(holder.content);
  }

  form.addEventListener("input", () => { clearTimeout(timer); timer = setTimeout(plan, DELAY); });
  form.addEventListener("submit", (event) => { event.preventDefault(); plan(); });
})();
