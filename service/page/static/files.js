// Files that are chosen or dropped, as the content of an input.

import { setInput } from "./inputs.js";

// Of files that are opened in quick succession the last one stays, though an earlier one may be read more slowly.
export function connectFiles(name, chooser, place) {
  let last = null;
  const read = async (file) => {
    last = file;
    const text = await file.text();
    if (file === last) setInput(name, text);
  };
  chooser.addEventListener("change", () => {
    if (chooser.files.length) read(chooser.files[0]);
    chooser.value = ""; // the same file can be read again
  });
  place.addEventListener("dragover", (event) => event.preventDefault());
  place.addEventListener("drop", (event) => {
    if (!event.dataTransfer.files.length) return;
    event.preventDefault();
    read(event.dataTransfer.files[0]);
  });
}
