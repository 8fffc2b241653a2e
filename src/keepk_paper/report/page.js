"use strict";
// A button in each heading sorts its table: numbers by value, words by the alphabet, empty cells last.
for (const button of document.querySelectorAll("th button")) {
  button.addEventListener("click", () => {
    const heading = button.closest("th");
    const body = heading.closest("table").tBodies[0];
    const up = heading.getAttribute("aria-sort") !== "ascending";
    const key = (row) => {
      const cell = row.cells[heading.cellIndex];
      return cell.dataset.sort ?? cell.textContent.trim();
    };
    const rows = [...body.rows];
    const numeric = rows.every((row) => key(row) === "" || Number.isFinite(Number(key(row))));
    rows.sort((one, other) => {
      const [a, b] = [key(one), key(other)];
      if (a === "" || b === "") return (a === "") - (b === "");
      const order = numeric ? Number(a) - Number(b) : a.localeCompare(b, "en", { numeric: true });
      return up ? order : -order;
    });
    for (const other of heading.parentNode.cells) {
      if (other.hasAttribute("aria-sort")) other.setAttribute("aria-sort", "none");
    }
    heading.setAttribute("aria-sort", up ? "ascending" : "descending");
    body.append(...rows);
  });
}
// A number links to the runs behind it, which are folded until then.
function reveal() {
  const target = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (!target) return;
  for (let it = target; it; it = it.parentElement) if (it.tagName === "DETAILS") it.open = true;
  target.scrollIntoView();
}
addEventListener("hashchange", reveal);
reveal();
