"use strict";
(() => {
  for (const legend of document.querySelectorAll(".legend")) {
    const section = legend.closest("section");
    legend.addEventListener("click", (event) => {
      const button = event.target.closest("button");
      if (!button) return;
      const shown = button.getAttribute("aria-pressed") !== "true";
      button.setAttribute("aria-pressed", String(shown));
      for (const part of section.querySelectorAll(`.run[data-run="${button.dataset.run}"]`)) {
        part.classList.toggle("off", !shown);
      }
    });
  }

  const tip = document.getElementById("tip");
  const hide = () => { tip.hidden = true; };
  const show = (event) => {
    const mark = event.target.closest?.("[data-tip]");
    if (!mark) return hide();
    tip.textContent = mark.dataset.tip;
    tip.hidden = false;
    const edge = 8, width = document.documentElement.clientWidth;
    const left = Math.min(Math.max(edge, event.clientX + 14), width - tip.offsetWidth - edge);
    const above = event.clientY - tip.offsetHeight - 14;
    tip.style.left = `${left + scrollX}px`;
    tip.style.top = `${(above < edge ? event.clientY + 18 : above) + scrollY}px`;
  };
  document.addEventListener("pointermove", show);
  document.addEventListener("pointerdown", show);
  document.addEventListener("scroll", hide, { passive: true });
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") hide(); });
})();
