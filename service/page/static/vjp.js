// Gradients of the tokens by a vector-Jacobian product.

import { element, muted } from "./dom.js";
import { number, table } from "./tables.js";
import { largest, legend, scored, unitsOf } from "./tokens.js";

export function drawGradient([{ body, result }]) {
  const units = unitsOf(result.tokens, [], [body.text], "tokens");
  const scale = largest(result.gradient);
  const isSigned = body.reduce === "dot";
  return [
    element("div", { className: "heading" },
      muted(isSigned ? "Dot product of each token's gradient and its vector." : "Length of the gradient by each token."), legend(scale, { isSigned })),
    scored(units, result.gradient, scale, "Gradients of the tokens"),
    table("Tokens", ["Token", "Gradient"], units.map(({ content }, index) => [content, number(result.gradient[index])])),
  ];
}
