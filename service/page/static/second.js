// The second opinion: gradients of the reference model beside the numbers of the served model.

import { alignmentTables, completeness, totals } from "./attribution.js";
import { card, details, element, facts, listed, muted, signed } from "./dom.js";
import { explainedTexts, inSentence, matterOf, nameOf, quoted } from "./deletion.js";
import { agrees, faithfulness } from "./faithfulness.js";
import { sum } from "./numbers.js";
import { equation, pairCards } from "./pairs.js";
import { secondText, TARGETS } from "./questions.js";
import { number, table } from "./tables.js";
import { isWord, largest, legend, scored } from "./tokens.js";

const find = (runs, key) => runs.find((run) => run.key === key && run.result);

// Weights of vocabulary entries, the only targets of sparse encoders, are other numbers than their scores.
export function secondRequests(all, model, runs) {
  const deletion = find(runs, "deletion");
  if (!model.gradients || !deletion?.result.explanations[0] || model.kind === "sparse") return [];
  // Without an explanation of the other document, the first answer is of one score, and no difference.
  const inputs = deletion.result.explanations[1] ? all : { ...all, c: "" };
  const options = { tolerance: Number(inputs["explain-tolerance"]), max_evaluations: Number(inputs["explain-evaluations"]) };
  const fields = { "/tolerance": "explain-tolerance", "/max_evaluations": "explain-evaluations" };
  const second = { isOptional: true, isSecond: true };
  // `rows`: the index, in the request, of each input whose words are compared.
  const attribution = (rows, body, pointers) => ({
    ...second, rows, name: "second opinion", path: "debug/attribute", fields: { ...fields, ...pointers },
    body: { ...body, ...options, baseline: model.gradients.baselines[0], faithfulness: "words" },
  });
  if (model.kind !== "embedding") {
    const target = { ...TARGETS[model.gradients.targets[0]](inputs), ...(model.kind === "classifier" && labelTarget(deletion.result, model)) };
    const body = { text: inputs.a, ...secondText(inputs, model), target };
    const pointers = { "/text": "a", "/text_pair": "b", "/target/versus": "c" };
    // As by deletion, the other text stays as it is.
    return body.text_pair === undefined ? [attribution({ a: 0 }, body, pointers)]
      : [attribution({ a: 0 }, { ...body, of: "text" }, pointers), attribution({ b: 1, c: 2 }, { ...body, of: "text_pair" }, pointers)];
  }
  const [a, b, c] = [["query", inputs.a], ["document", inputs.b], ["document", inputs.c]].map(([side, text]) => prompted(text, side, model));
  const type = model.similarity === "cosine" ? "cosine" : "similarity";
  const pair = {
    ...second, key: "pair", name: "contribution of each pair of words", path: "debug/attribute/pair",
    fields: { ...fields, "/a": "a", "/b": "b", "/layer": "pair-layer", "/baseline": "pair-baseline" },
    body: { a, b, layer: inputs["pair-layer"], baseline: inputs["pair-baseline"], ...options },
  };
  const directions = inputs.c
    ? [attribution({ a: 0 }, { text: a, target: { type: "margin", positive: b, negative: c } }, { "/text": "a", "/target/positive": "b", "/target/negative": "c" })]
    : [attribution({ a: 0 }, { text: a, target: { type, text: b } }, { "/text": "a", "/target/text": "b" }),
      attribution({ b: 0 }, { text: b, target: { type, text: a } }, { "/text": "b", "/target/text": "a" })];
  return [...(model.gradients.routes.includes("attribute/pair") ? [pair] : []), ...directions];
}

// /score prepends these prompts.
const prompted = (text, side, { prompts }) => (prompts.includes(side) ? { text, prompt_name: side } : text);

// A probability of a softmax is that of a label against the others: the next one stands for them.
function labelTarget({ labels: [scores], explanations: [{ label }] }, { info }) {
  const next = info.activation === "softmax" ? scores.find((other) => other.label !== label) : null;
  return { label, versus: next?.label ?? null };
}

// The units of the explained texts with both numbers. A token belongs to the unit in which it ends.
function comparison(run, texts) {
  const { tokens, scores } = run.result;
  const rows = texts.filter(({ input }) => input in run.rows).map((explained) => ({ index: run.rows[explained.input], explained }));
  const matter = matterOf(rows.flatMap(({ explained }) => explained.units));
  return rows.map(({ index, explained }) => ({
    name: explained.name,
    units: explained.units.map((unit) => {
      const own = tokens.map((token, at) => [token, scores[at]]).filter(([token]) => token.text === index && token.end > unit.start && token.end <= unit.end);
      const gradient = own.length ? sum(own.map(([, score]) => score)) : null;
      const matters = unit.score !== null && Math.abs(unit.score) >= matter;
      return { ...unit, gradient, matters, isOpposite: matters && gradient !== null && unit.score * gradient < 0 };
    }),
  }));
}

const attributions = (runs) => runs.filter(({ path, result }) => path === "debug/attribute" && result);
const oppositeOf = (rows) => rows.flatMap(({ units }) => units.filter(({ isOpposite }) => isOpposite));

export function secondChecks(runs, model) {
  const deletion = find(runs, "deletion");
  const verdicts = attributions(runs).map((run) => agrees(run.result.faithfulness, oppositeOf(comparison(run, explainedTexts(deletion, model)))));
  if (!verdicts.length) return [];
  const passes = verdicts.includes(false) ? false : verdicts.includes(null) ? null : true;
  return [["Agrees with deletion", passes, passes ? "the same signs and a similar order" : "see the second opinion: signs or order differ"]];
}

export function drawSecond(runs, model, isPending) {
  const deletion = find(runs, "deletion");
  if (!deletion) return [];
  if (model.problem) return [card("Second opinion", muted(`Gradients are not available: ${model.problem}.`))];
  if (model.kind === "sparse") return [];
  const problems = [...new Set(runs.flatMap(({ isSecond, problem }) => (isSecond && problem ? [problem] : [])))].map((problem) => muted(problem));
  const found = attributions(runs);
  const compared = found.map((run) => [run, comparison(run, explainedTexts(deletion, model))]);
  const pair = find(runs, "pair");
  const [words, map] = pair ? pairCards(pair, nameOf(deletion)) : [];
  const state = !isPending ? "They were not computed." : model.gradients ? "They are being computed." : "The gradient process is starting.";
  return [
    card("Second opinion: integrated gradients",
      ...(found.length ? opinion(compared) : []), ...problems, ...(found.length || problems.length ? [] : [muted(state)])),
    ...(pair ? [words, details("Every pair of words", map)] : []),
    ...(found.length ? alignmentTables(found[0]) : []),
    ...(found.length || pair ? [exactness(pair, found, nameOf(deletion))] : []),
  ];
}

const MOST_NAMED = 4;

function opinion(compared) {
  const rows = compared.flatMap(([, own]) => own);
  const opposite = oppositeOf(rows);
  const scale = largest(rows.flatMap(({ units }) => units.map(({ gradient }) => gradient)));
  const words = opposite.filter(isWord);
  const named = words.slice(0, MOST_NAMED).map((unit) => `${quoted(unit)} (left out ${signed(unit.score)}, gradients ${signed(unit.gradient)})`);
  const others = words.length - named.length;
  return [
    element("div", { className: "heading" },
      element("p", {}, words.length
        ? `Opposite signs: ${listed(others ? [...named, `${others} more`] : named)}. Deletion is what the served model does without the word.`
        : `No word that matters has the opposite sign${opposite.length ? "; punctuation has it" : ""}.`),
      legend(scale)),
    ...rows.map(({ name, units }) => element("section", { className: "passage" }, element("h4", {}, name),
      scored(units.map((unit) => ({ ...unit, spelled: unit.isOpposite ? "opposite sign" : unit.matters ? "same sign" : "matters little" })),
        units.map(({ gradient }) => gradient), scale, `Integrated gradients of ${inSentence(name)}`))),
    element("div", { className: "columns" }, ...compared.flatMap(([run, own]) =>
      faithfulness(run.result, compared.length > 1 ? ` of ${listed(own.map(({ name }) => inSentence(name)))}` : "", oppositeOf(own)))),
    bothTable(rows),
  ];
}

const bothTable = (rows) => details("Both numbers of each word",
  table("Deletion and integrated gradients", ["Word or sentence", "Text", "Left out", "Gradients", "Signs"],
    rows.flatMap(({ name, units }) => units.map(({ content, score, gradient, matters, isOpposite }) =>
      [content, name, score === null ? "not measured" : number(score), gradient === null ? "no tokens" : number(gradient),
        isOpposite ? "opposite" : matters ? "same" : "matters little"]))));

const exactness = (pair, found, name) => details("How exact are the gradients?",
  ...(pair ? [equation(pair.result, name)] : []),
  element("div", { className: "columns" },
    ...(pair?.result.completeness ?? []).map((complete, index) =>
      element("div", {}, element("h4", {}, `Path integral of the pairs, text ${"AB"[index]}`), facts(completeness(complete)))),
    ...found.map(({ result, body }, index) =>
      element("div", {}, element("h4", {}, `Integrated gradients, ${index + 1} of ${found.length}`), totals(result, body.target)))));
