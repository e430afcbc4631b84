// Many questions at once: metrics of the rankings, and the questions whose first document is not expected.

import { byId, count, element, facts, muted, percent, problemsOf, shown } from "./dom.js";
import { connectFiles } from "./files.js";
import { hits, judgedRanking, meanNdcg, meanReciprocalRank } from "./metrics.js";
import { sum } from "./numbers.js";
import { parseQuestions } from "./question_file.js";
import { scoreBody } from "./questions.js";
import { openRanking } from "./rank_open.js";
import { MAX_PASSAGES } from "./rank_passages.js";
import { headline } from "./reading.js";
import { Problem } from "./request.js";
import { number, table } from "./tables.js";

const MOST_NAMED = 5;

export function evaluationRequests(inputs, model) {
  const { questions, problems } = parseQuestions(inputs["question-list"]);
  if (problems.length) throw new Problem(named(problems), { field: "question-list" });
  return questions.map((question) => ({
    question, total: questions.length, isOptional: true, isOneOfMany: true, name: `question of line ${question.line}`,
    path: "score", body: scoreBody(question.query, question.documents, model),
  }));
}

function named(problems) {
  const others = problems.length - MOST_NAMED;
  return [...problems.slice(0, MOST_NAMED), ...(others > 0 ? [`${count(others, "further wrong line")}`] : [])].join("; ");
}

export function drawEvaluation(runs, inputs) {
  const answered = runs.filter(({ result }) => result).map(({ question, result: { scores } }) =>
    ({ ...question, ...judgedRanking(scores, question.relevance) }));
  const failed = runs.filter(({ problem }) => problem).length;
  const { total } = runs[0];
  const waiting = total - answered.length - failed;
  const failures = answered.filter(({ rank }) => rank > 1);
  const k = Math.max(1, Math.floor(Number(inputs["hits-k"])) || 1);
  const first = answered.length - failures.length;
  return [
    headline(percent(first / answered.length), "hits@1",
      `${first} of ${count(answered.length, "question")} ${first === 1 ? "has" : "have"} an expected document first.`,
      failed ? `${count(failed, "question")} of ${total} ${failed === 1 ? "has" : "have"} no result and ${failed === 1 ? "does" : "do"} not count.` : "",
      waiting ? `${count(waiting, "question")} of ${total} ${waiting === 1 ? "has" : "have"} not run.` : ""),
    facts({
      "hits@1": shown(hits(answered, 1)), [`hits@${k}`]: shown(hits(answered, k)),
      MRR: shown(meanReciprocalRank(answered)), "nDCG@10": shown(meanNdcg(answered)),
    }),
    ...problemsOf(runs),
    ...(failures.length ? [failureTable(failures)] : [element("p", {}, "No question has another document first.")]),
  ];
}

// The question with the largest distance to the first place comes first.
function failureTable(failures) {
  const rows = [...failures].sort((one, other) => one.margin - other.margin).map((failure) => {
    const { query, documents, expected, rival, rank, margin } = failure;
    const open = element("button", { type: "button", className: "link", title: "Explain this ranking" }, query);
    open.addEventListener("click", () => openQuestion(failure));
    return [open, number(rank, `${rank} of ${documents.length}`), number(margin), clipped(documents[expected]), clipped(documents[rival])];
  });
  return element("div", { className: "failures" },
    table("Questions whose first document is not expected", ["Query", "Rank", "Margin", "Expected document", "First document"], rows),
    muted("Rank: place of the best expected document. Margin: its score less that of the first document."));
}

const clipped = (text) => element("div", { className: "clipped", title: text }, text);

// Rank the best documents of a question, of which the expected one is the last if it is not among them.
function openQuestion({ query, documents, places, expected }) {
  const best = places.slice(0, MAX_PASSAGES);
  if (!best.includes(expected)) best.splice(-1, 1, expected);
  openRanking(query, best.map((index) => documents[index]), best.indexOf(expected));
}

// Read files that are chosen or dropped, and say at once what the list has.
export function connectEvaluation() {
  const list = document.querySelector("[name=question-list]");
  connectFiles("question-list", byId("question-file"), byId("questions"));
  const summarize = () => {
    const { questions, problems } = parseQuestions(list.value);
    byId("questions-read").textContent = problems.length ? `Wrong lines: ${named(problems)}.`
      : `${count(questions.length, "question")} with ${count(sum(questions.map(({ documents }) => documents.length)), "document")}.`;
  };
  list.addEventListener("input", summarize);
  summarize();
}
