// Charts, or a message in their place if the chart library is not installed.

import { element } from "./dom.js";

let library;

// The library has several megabytes, so it is loaded only with the first chart.
function loaded() {
  library ??= new Promise((resolve) => {
    const script = element("script", { src: "debug/assets/plotly.min.js" });
    script.onload = () => resolve(true);
    script.onerror = () => resolve(false);
    document.head.append(script);
  });
  return library;
}

export function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

export function divergingScale() {
  return ["low", "low-half", "neutral", "high-half", "high"].map((name, index) => [index / 4, colour(name)]);
}

// The library interprets tags and entities in labels: escape them.
export function label(text) {
  return text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
}

export function chart(description, height, traces, layout) {
  const container = element("div", { className: "chart", role: "img", style: { "min-height": `${height}px` }, aria: { label: description } });
  draw(container, height, traces, layout);
  return container;
}

async function draw(container, height, traces, layout) {
  if (!(await loaded())) {
    container.style.removeProperty("min-height");
    container.replaceChildren("The chart library is not installed. Install Vitrine with the extra 'torch'.");
    return;
  }
  // A redraw may have removed the container in the meantime.
  if (!container.isConnected) return;
  const axis = { gridcolor: colour("line"), linecolor: colour("line"), zerolinecolor: colour("line"), automargin: true };
  const { xaxis, yaxis, ...others } = layout;
  await globalThis.Plotly.newPlot(container, traces, {
    height,
    margin: { l: 8, r: 8, t: 8, b: 8 },
    paper_bgcolor: "transparent",
    plot_bgcolor: "transparent",
    font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: colour("text") },
    hoverlabel: { align: "left" },
    xaxis: { ...axis, ...xaxis },
    yaxis: { ...axis, ...yaxis },
    ...others,
  }, { displayModeBar: false, responsive: true });
}
