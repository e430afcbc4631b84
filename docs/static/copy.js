// A button on each code block, which copies the code. Of a terminal session it copies the commands, without their output.
const goesOn = (command) => command.endsWith("\\") || ["'", '"'].some((quote) => command.split(quote).length % 2 === 0);

function commandsOf(session) {
  const commands = [];
  for (const line of session.split("\n")) {
    if (line.startsWith("$ ")) commands.push(line.slice(2));
    else if (commands.length > 0 && goesOn(commands.at(-1))) commands.push(`${commands.pop()}\n${line}`);
  }
  return commands.join("\n");
}

for (const block of document.querySelectorAll("div.highlight")) {
  const button = document.createElement("button");
  button.className = "copy";
  button.textContent = "Copy";
  button.addEventListener("click", async () => {
    const code = block.querySelector("pre").textContent.trim();
    await navigator.clipboard.writeText(code.startsWith("$ ") ? commandsOf(code) : code);
    button.textContent = "Copied";
  });
  block.append(button);
}
