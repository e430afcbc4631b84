// Colours of the page's style sheet, and scales of them for scores.

export function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

// Cold below zero, neutral at zero, warm above.
export function diverging(score, scale) {
  if (!Number.isFinite(score)) return { background: "transparent", color: colour("bad") };
  const size = scale ? Math.min(1, Math.abs(score) / scale) : 0;
  const [half, end] = score < 0 ? ["low-half", "low"] : ["high-half", "high"];
  const background = size < 0.5
    ? mixed(colour("neutral"), colour(half), size * 2)
    : mixed(colour(half), colour(end), size * 2 - 1);
  return { background: `rgb(${background.join(" ")})`, color: readable(background) };
}

function mixed(from, to, weight) {
  const numbers = (hex) => [1, 3, 5].map((index) => parseInt(hex.slice(index, index + 2), 16));
  const [start, stop] = [numbers(from), numbers(to)];
  return start.map((channel, index) => Math.round(channel + (stop[index] - channel) * weight));
}

// Black or white text, whichever has the higher contrast by WCAG's relative luminance: at least 4.58.
function readable(rgb) {
  const linear = rgb.map((channel) => {
    const part = channel / 255;
    return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
  });
  const luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
  return luminance > 0.179 ? "#000000" : "#ffffff";
}
