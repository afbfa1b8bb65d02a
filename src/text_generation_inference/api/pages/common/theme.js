// Light or dark, before anything is painted. Loaded by a plain <script> in <head>; `theme.set` is for the button of a page.
(() => {
  const KEY = "tgi.theme";
  const apply = (choice) => {
    if (choice === "light" || choice === "dark") document.documentElement.dataset.theme = choice;
    else delete document.documentElement.dataset.theme;
  };
  let chosen = "auto";
  try {
    chosen = localStorage.getItem(KEY) ?? "auto";
  } catch {
    // a browser that keeps nothing: the system's wish decides
  }
  apply(chosen);
  window.theme = {
    get: () => chosen,
    set(choice) {
      chosen = choice;
      apply(choice);
      try {
        localStorage.setItem(KEY, choice);
      } catch {
        // holds until the page is closed
      }
    },
  };
})();
