// Before the first paint: the theme that was chosen, or the system's.
(() => {
  const chosen = localStorage.getItem("triptych.theme");
  const isDark = chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset.theme = isDark ? "dark" : "light";
})();
