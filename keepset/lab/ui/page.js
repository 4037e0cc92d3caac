// The playground. All that is typed, read or answered goes into the document as text.
const megabytes = (size) => `${(size / 1e6).toFixed(2)} MB`;
const seconds = (time) => `${time.toFixed(2)} s`;
const SIDES = ["full", "compressed"];

let shares = [], drawn = [], told = {}, running = null;
const shareOf = ({ from, to }) => shares.slice(from, to).reduce((sum, share) => sum + share, 0) / (to - from);
const shownText = tokenText((piece) => (shares.length ? `kept by ${percent(shareOf(piece))} of the heads so far` : "not compressed yet"));

function shade() {
  for (const piece of drawn) shadeBy(piece.span, shareOf(piece));
  shownText.refresh();
}

function costs(side) {
  const { bytes: size, allocated, read, answer, answered, kept, share } = told[side];
  const parts = [`${megabytes(size)} in 16 bits`, `${megabytes(allocated)} allocated`, `read in ${seconds(read)}`];
  if (kept !== undefined) parts.unshift(`${percent(share)} of a full 16-bit cache’s bytes`, `${percent(kept)} of the entries`);
  if (answered) parts.push(`${answered} tokens in ${seconds(answer)}`);
  id(`${side}-cost`).textContent = parts.join(" · ");
}

const tell = (name) => (text, failed = false) => {
  id(name).textContent = text;
  id(name).classList.toggle("failed", failed);
};
const status = tell("status"), chatStatus = tell("chat-status");

function take(event) {
  if (event.error) return status(event.error, true);
  if (event.tokens) {
    id("result").hidden = false;
    drawn = shownText.write(event.tokens, event.grids);
    for (const name of ["command", "python"]) id(name).textContent = event[name];
    status(`The full cache reads ${integer(event.tokens.length)} tokens …`);
  }
  if (event.shares) {
    shares = event.shares;
    shade();
    status(`Compressed ${event.layer} of ${event.of} layers …`);
  }
  for (const side of SIDES) {
    if (!event[side]) continue;
    told[side] = { ...told[side], ...event[side] };
    id(`${side}-reply`).append(event[side].text ?? "");
    costs(side);
  }
  if (event.full?.read) status("The recipe’s cache reads the text …");
  if (event.compressed?.text) status("Answering …");
  if (event.note) told.note = event.note;
  if (event.done) {
    status(["Done.", told.note].filter(Boolean).join(" "));
    judge();
  }
}

// Says at once what a reader would compare two texts for.
function judge() {
  const [full, compressed] = SIDES.map((side) => id(`${side}-reply`).textContent.trim());
  const asked = told.full.answered || told.compressed.answered;
  const same = full === compressed;
  id("verdict").className = asked ? (same ? "same" : "other") : "";
  if (!asked) return void (id("verdict").textContent = "Nothing was asked.");
  const share = told.compressed.share === undefined ? "" : ` with ${percent(told.compressed.share)} of the bytes`;
  const words = (text) => text.split(/\s+/);
  const first = words(full).findIndex((word, i) => word !== words(compressed)[i]);
  const place = first < 0 ? words(full).length + 1 : first + 1;
  id("verdict").textContent = same ? `The same answer${share}.` : `Another answer${share}: it differs from word ${place} on.`;
}

// The recipe's text, and whether it names a budget, which then counts in place of the field's.
const OWN = "\u0000";
const recipe = () => (id("recipes").value === OWN ? id("recipe").value : id("recipes").value);

function choose() {
  id("own").hidden = id("recipes").value !== OWN;
  const named = /\b(keep|bytes)\s*=/.test(recipe());
  id("budget").disabled = named;
  id("budget-label").textContent = named ? "Budget: the recipe names it" : "Budget";
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (let part = await reader.read(); !part.done; part = await reader.read()) {
    const blocks = (rest + part.value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) yield JSON.parse(block.slice("data: ".length));
  }
}

// The chosen file as base64, or nothing.
async function image() {
  const [file] = id("image").files;
  if (!file) return "";
  if (file.size > data.image) throw new RangeError(`The image has more than ${integer(data.image / 2 ** 20)} MB: choose a smaller one.`);
  const bytes = new Uint8Array(await file.arrayBuffer());
  let text = "";
  for (let at = 0; at < bytes.length; at += 32768) text += String.fromCharCode(...bytes.subarray(at, at + 32768));
  return btoa(text);
}

function busy(now) {
  for (const name of ["run", "say", "again", "undo"]) id(name).disabled = now;
  for (const name of ["stop", "chat-stop"]) id(name).hidden = !now;
}

// Posts what `body` returns, and takes the events of the answer.
async function post(path, body, take, status) {
  running = new AbortController();
  busy(true);
  status("Starting …");
  try {
    const headers = { "Content-Type": "application/json" };
    const response = await fetch(path, { method: "POST", headers, body: JSON.stringify(await body()), signal: running.signal });
    if (response.ok) for await (const event of events(response)) take(event);
    else status(await response.text(), true);
  } catch (error) {
    if (error instanceof RangeError) status(error.message, true);
    else status(running.signal.aborted ? "Stopped." : "The server does not answer: is keepset ui still running?", !running.signal.aborted);
  }
  busy(false);
}

async function run() {
  id("result").hidden = true;
  [shares, drawn, told] = [[], [], { full: {}, compressed: {} }];
  for (const side of SIDES) id(`${side}-reply`).replaceChildren();
  for (const side of SIDES) id(`${side}-cost`).textContent = "";
  id("compressed-name").textContent = recipe();
  id("verdict").textContent = "";
  id("verdict").className = "";
  const body = async () => ({ text: id("input").value, question: id("question").value, recipe: recipe(), budget: id("budget").value, image: await image() });
  await post("/run", body, take, status);
}

// The chat: the messages so far, the user's and the model's in turn. The server has the same conversation, and finds out
// itself what a history goes on with.
let said = [];

// Answers the last message. If that fails, the message goes back to where it was written.
async function say(text) {
  const reply = el("p", { className: "reply" }), cost = el("p", { className: "note" });
  const question = el("p", { className: "reply said" }, visible(text));
  id("messages").append(el("div", {}, question, reply, cost));
  let done = false;
  const takeTurn = (event) => {
    if (event.error) return chatStatus(event.error, true);
    if (event.text) reply.append(visible(event.text));
    chatStatus("Answering …");
    if (event.answer === undefined) return;
    said.push(text, event.answer);
    [reply.textContent, cost.textContent, done] = [visible(event.answer), event.status, true];
    chatStatus("");
  };
  await post("/chat", () => ({ history: [...said, text] }), takeTurn, chatStatus);
  if (done) return;
  id("messages").lastChild.remove();
  id("message").value ||= text;
}

// Takes the newest turn back, and returns its message.
function undone() {
  if (!said.length) return void chatStatus("Nothing was said yet: write a message.", true);
  id("messages").lastChild.remove();
  return said.splice(-2)[0];
}

function show(mode) {
  for (const button of document.querySelectorAll("[data-mode]")) {
    const chosen = button.dataset.mode === mode;
    button.setAttribute("aria-pressed", String(chosen));
    id(button.dataset.mode).hidden = !chosen;
  }
}

id("model").textContent = data.model;
id("room").textContent = `up to ${integer(data.limit)} tokens`;
id("with-image").hidden = id("image-file").hidden = !data.image;
id("image-room").textContent = `up to ${integer(data.image / 2 ** 20)} MB`;
id("input").value = visible(data.text);
id("question").value = data.question;
const group = (label, values) => el("optgroup", { label }, ...values.map((value) => el("option", { value }, value)));
id("recipe").value = data.recipes[0];
id("recipes").append(group("Suggested", data.recipes), group("All methods", data.methods));
id("recipes").append(el("option", { value: OWN }, "Write your own \u2026"));
id("recipes").addEventListener("change", () => {
  if (id("recipes").value !== OWN) id("recipe").value = id("recipes").value;
  choose();
  if (id("recipes").value === OWN) id("recipe").focus();
});
id("recipe").addEventListener("input", choose);
choose();
fillScale();
id("form").addEventListener("submit", (event) => { event.preventDefault(); run(); });
for (const name of ["stop", "chat-stop"]) id(name).addEventListener("click", () => running.abort());
for (const button of document.querySelectorAll("[data-mode]")) button.addEventListener("click", () => show(button.dataset.mode));
id("chat-recipe").textContent = data.chat;
id("chat-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = id("message").value;
  id("message").value = "";
  say(text);
});
id("again").addEventListener("click", () => { const text = undone(); if (text !== undefined) say(text); });
id("undo").addEventListener("click", undone);
for (const button of document.querySelectorAll("[data-copy]")) {
  button.addEventListener("click", async () => {
    await navigator.clipboard.writeText(id(button.dataset.copy).textContent);
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  });
}
