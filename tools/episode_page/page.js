"use strict";
// Keys: an element with data-key="x" is clicked (or focused) by x; rows with data-row are walked by j and k; steps by the arrows.
const all = (what) => [...document.querySelectorAll(what)];
const steps = all("[data-step]");
const rows = all("[data-row]");
let step = 1;
let row = -1;

function goto(n) {
  step = Math.min(Math.max(n, 1), steps.length);
  for (const s of steps) s.classList.toggle("on", Number(s.dataset.step) === step);
  for (const g of all("[data-goto]")) g.classList.toggle("on", Number(g.dataset.goto) === step);
  history.replaceState(null, "", `#step-${step}`);
}

function walk(by) {
  row = Math.min(Math.max(row + by, 0), rows.length - 1);
  rows.forEach((r, i) => r.classList.toggle("on", i === row));
  rows[row].scrollIntoView({ block: "nearest" });
}

if (steps.length) {
  document.body.classList.add("stepping");
  for (const g of all("[data-goto]")) g.addEventListener("click", (e) => { e.preventDefault(); goto(Number(g.dataset.goto)); });
  for (const s of steps) s.removeAttribute("id"); // a fragment would scroll the page to it
  const wanted = /^#step-(\d{1,6})$/.exec(location.hash);
  goto(wanted ? Number(wanted[1]) : 1);
  scrollTo(0, 0);
}

const MOVES = {
  ArrowRight: () => steps.length && goto(step + 1), ArrowLeft: () => steps.length && goto(step - 1),
  Home: () => steps.length && goto(1), End: () => steps.length && goto(steps.length),
  j: () => rows.length && walk(1), k: () => rows.length && walk(-1),
  Enter: () => row >= 0 && rows[row].querySelector("a").click(),
  g: () => row >= 0 && rows[row].querySelector("a[href^='/group']")?.click(),
};

document.addEventListener("keydown", (e) => {
  if (e.ctrlKey || e.metaKey || e.altKey) return;
  if (e.target.closest("input, select, textarea")) {
    if (e.key === "Escape") e.target.blur();
    return;
  }
  if (e.repeat && !e.key.startsWith("Arrow") && !rows.length) return; // a key held down labels one episode, not many
  const bound = all("[data-key]").find((x) => x.dataset.key.split(" ").includes(e.key));
  if (bound && !(e.key === "Enter" && e.target.closest("a, button, summary"))) {
    e.preventDefault();
    if (bound.matches("input")) { bound.focus(); bound.select(); } else bound.click();
  } else if (e.key in MOVES && !(e.key === "Enter" && e.target.closest("a, button, summary"))) {
    if (MOVES[e.key]() !== false) e.preventDefault();
  }
});
