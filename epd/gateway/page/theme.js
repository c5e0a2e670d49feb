// Loaded before anything is drawn, so that a chosen theme does not flash the other one first.
(() => {
  try {
    const chosen = localStorage.getItem("mimo.theme");
    if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
  } catch {
    // Storage may be forbidden; the system's own theme it is.
  }
})();
