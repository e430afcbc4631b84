// State of the page: the served model, and the runs of each section.

import { byId } from "./dom.js";
import { SECTIONS } from "./sections.js";

// The capabilities of the served model are null until they have arrived. `models` are all models of the service.
export const state = { model: null, models: [], current: "explain" };

// The runs of each section, the JSON of their requests, and how to cancel them.
export const sections = Object.fromEntries(Object.keys(SECTIONS).map((name) => [name, { runs: [], asked: null, controller: null }]));

// A part of a section that the template `run` in index.html has.
export const part = (name, className) =>
  byId(name).querySelector(`:scope > .${className}, :scope > .run > .${className}, :scope > .progress > .${className}`);

export const key = () => byId("key").value;
