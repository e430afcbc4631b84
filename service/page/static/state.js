// State of the page: the served model, and the runs of each section.

import { byId } from "./dom.js";
import { SECTIONS } from "./sections.js";

// The served model is null until its description has arrived. `models` are all models of the service.
export const state = { model: null, models: [], current: "rank" };

// The runs of each section, the inputs that they are of, how to cancel them, and whether its first answer, or the
// second opinion after it, is being computed.
export const sections = Object.fromEntries(Object.keys(SECTIONS).map((name) =>
  [name, { runs: [], inputs: null, controller: null, isRunning: false, isSecond: false }]));

// A part of a section that the template `run` in index.html has.
export const part = (name, className) =>
  byId(name).querySelector(`:scope > .${className}, :scope > .run > .${className}, :scope > .progress > .${className}`);

export const key = () => byId("key").value;
