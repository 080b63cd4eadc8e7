"""What the report's page does itself: shows the charts, follows dark mode, zooms by buttons."""

STYLE = """
.figures{display:grid;grid-template-columns:repeat(auto-fit,minmax(9rem,1fr));
gap:.6rem;margin:1rem 0}
.figures div{background:var(--panel);border:1px solid var(--line);border-radius:6px;
padding:.5rem .7rem}
.figures dt{color:var(--soft);font-size:.85rem}
.figures dd{margin:0;font-size:1.15rem;font-weight:600}
.chart{width:100%;margin:.4rem 0;--base-font:inherit}
.controls{display:flex;flex-wrap:wrap;gap:.4rem;align-items:center;margin:.5rem 0}
button,select{font:inherit;color:var(--ink);background:var(--panel);border:1px solid var(--soft);
border-radius:6px;padding:.3rem .7rem;min-height:2.2rem;max-width:100%}
.job{display:flex;align-items:baseline}.swatch{flex:none;display:inline-block;width:.8rem;height:.8rem;border-radius:2px;margin-right:.45rem;
vertical-align:-1px}
.bar{display:block;position:relative;height:.7rem;min-width:8rem;background:var(--panel);
border:1px solid var(--line)}.bar i{display:block;height:100%;background:var(--bar)}
.bar b{position:absolute;top:-.25rem;bottom:-.25rem;width:0;border-left:2px dashed var(--ink)}
summary{cursor:pointer;padding:.3rem 0;color:var(--link)}
"""

#: Of constants alone: what the report says comes as JSON, never as a part of this text.
SCRIPT = """
(function(){
"use strict";
var data = JSON.parse(document.getElementById("charts").textContent);
if (!data) return;
var all = [];
function models() { return all; }
function ink() {
  var style = getComputedStyle(document.documentElement);
  var strong = style.getPropertyValue("--ink").trim();
  models().forEach(function (chart) {
    chart.left.concat(chart.below).forEach(function (axis) {
      axis.axis_label_text_color = strong; axis.major_label_text_color = strong;
      axis.axis_line_color = strong; axis.major_tick_line_color = strong;
      axis.minor_tick_line_color = null;
    });
    chart.center.forEach(function (part) {
      if (part.tags && part.tags.indexOf("ink") >= 0) part.text_color = strong;
    });
  });
}
function zoom(range, factor, move) {
  var span = range.end - range.start, middle = (range.end + range.start) / 2 + move * span;
  var start = middle - span * factor / 2, end = middle + span * factor / 2, full = whole;
  if (start < full[0]) { end += full[0] - start; start = full[0]; }
  if (end > full[1]) { start -= end - full[1]; end = full[1]; }
  range.setv({start: Math.max(start, full[0]), end: Math.min(end, full[1])});
  document.querySelectorAll("[data-shown]").forEach(function (out) {
    out.textContent = range.start.toFixed(3) + " s to " + range.end.toFixed(3) + " s";
  });
}
var whole = [0, 1];
function choose(job) {
  models().forEach(function (chart) {
    chart.renderers.forEach(function (drawn) {
      var source = drawn.data_source;
      if (!source || source.name !== "jobs") return;
      var rows = [];
      if (job >= 0) Array.from(source.data.job).forEach(function (of, at) {
        if (of === job) rows.push(at);
      });
      if (job >= 0 && !rows.length) rows = [-1];
      source.selected.indices = rows;
    });
  });
}
var moves = {"in": [0.5, 0], "out": [2, 0], "left": [1, -0.25], "right": [1, 0.25],
             "all": [1e9, 0]};
Bokeh.embed.embed_items(data.documents, data.items).then(function () {
  Bokeh.documents.forEach(function (shown) {
    shown.roots().forEach(function (root) { all.push(root); });
  });
  var timed = all.find(function (c) { return c.name === "memory" || c.name === "lanes"; });
  if (timed) whole = [timed.x_range.start, timed.x_range.end];
  document.querySelectorAll("button[data-move]").forEach(function (button) {
    button.addEventListener("click", function () {
      var move = moves[button.dataset.move];
      zoom(timed.x_range, move[0], move[1]);
    });
  });
  var tall = document.getElementById("tall");
  if (tall) tall.addEventListener("click", function () {
    var memory = all.find(function (c) { return c.name === "memory"; });
    var on = tall.getAttribute("aria-pressed") !== "true";
    tall.setAttribute("aria-pressed", String(on));
    memory.y_range.end = memory.tags[on ? 0 : 1];
  });
  var select = document.getElementById("job");
  if (select) select.addEventListener("change", function () { choose(Number(select.value)); });
  if (matchMedia("(pointer: coarse)").matches)
    all.forEach(function (chart) { chart.toolbar.active_drag = null; });
  ink();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", ink);
  document.documentElement.dataset.ready = "yes";
});
})();
"""
