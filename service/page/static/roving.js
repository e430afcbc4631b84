// One tab stop for a row of items; arrow keys, Home and End move inside.

const STEPS = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };
// In rows from right to left.
const MIRRORED = { ...STEPS, ArrowRight: -1, ArrowLeft: 1 };

// Such as Alt + left arrow, which goes back.
export const isOfBrowser = ({ altKey, ctrlKey, metaKey }) => altKey || ctrlKey || metaKey;

export function rove(container, items) {
  items.forEach((item, index) => { item.tabIndex = index ? -1 : 0; });
  container.addEventListener("keydown", (event) => {
    if (isOfBrowser(event)) return;
    const open = items.filter(({ hidden }) => !hidden);
    const at = open.indexOf(event.target.closest("[tabindex], button"));
    const steps = getComputedStyle(container).direction === "rtl" ? MIRRORED : STEPS;
    const next = event.key === "Home" ? 0
      : event.key === "End" ? open.length - 1
        : event.key in steps ? (at + steps[event.key] + open.length) % open.length : -1;
    if (at < 0 || next < 0) return;
    event.preventDefault();
    open[next].focus();
  });
  container.addEventListener("focusin", (event) => {
    if (!items.includes(event.target)) return;
    for (const item of items) item.tabIndex = item === event.target ? 0 : -1;
  });
}
