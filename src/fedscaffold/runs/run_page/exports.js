// What is shown, for others: CSV, LaTeX and SVG, as text. Cells may come from a stranger's configuration.
"use strict";
const Exports = (() => {
  // A cell that a spreadsheet would take for a formula gets an apostrophe before it; numbers stay numbers.
  function cell(value) {
    if (value === null || value === undefined) return "";
    if (typeof value !== "string") return String(value);
    const risky = /^[=+\-@\t\r]/.test(value) && !Number.isFinite(Number(value));
    const text = risky ? `'${value}` : value;
    return /[",\n\r]/.test(text) ? `"${text.replace(/"/g, '""')}"` : text;
  }
  const csv = lines => lines.map(line => line.map(cell).join(",") + "\n").join("");

  const SPECIAL = { "\\": "\\textbackslash{}", "~": "\\textasciitilde{}", "^": "\\textasciicircum{}", "<": "$<$", ">": "$>$",
    "±": "$\\pm$", "✔": "", "✘": "", "|": "$|$", '"': "''", "\n": " ", "\r": " ", "\t": " " };
  for (const c of "&%$#_{}") SPECIAL[c] = "\\" + c;
  const words = text => [...String(text)].map(c => SPECIAL[c] ?? c).join("").trim();
  function latex(lines) {
    const [head, ...body] = lines.map(line => line.map(words).join(" & ") + " \\\\");
    const columns = "l" + "r".repeat(lines[0].length - 1);
    return [`\\begin{tabular}{${columns}}`, "\\toprule", head, "\\midrule", ...body, "\\bottomrule", "\\end{tabular}", ""].join("\n");
  }

  // A drawing that stands alone: what the page's style says is written into its elements.
  const KEPT = ["fill", "stroke", "stroke-width", "stroke-dasharray", "opacity", "font-size", "font-weight", "font-family", "text-anchor"];
  function svg(element) {
    const copy = element.cloneNode(true), from = [element, ...element.querySelectorAll("*")], to = [copy, ...copy.querySelectorAll("*")];
    from.forEach((one, k) => {
      const style = getComputedStyle(one);
      for (const name of KEPT) if (style.getPropertyValue(name)) to[k].setAttribute(name, style.getPropertyValue(name));
      for (const name of ["class", "tabindex", "style"]) to[k].removeAttribute(name);
    });
    copy.querySelectorAll("[data-hit]").forEach(one => one.remove());
    copy.style.background = getComputedStyle(document.body).backgroundColor;
    return new XMLSerializer().serializeToString(copy);
  }

  function download(name, type, text) {
    const link = document.createElement("a"), address = URL.createObjectURL(new Blob([text], { type }));
    Object.assign(link, { href: address, download: name });
    document.body.append(link); link.click(); link.remove();
    setTimeout(() => URL.revokeObjectURL(address), 10000);
  }
  return { csv, download, latex, svg };
})();
