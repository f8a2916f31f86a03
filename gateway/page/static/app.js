/** The page: holds the conversation and lets its parts know of each other. */

import { Composer } from "./composer.js";
import { placedPictures, questionOf } from "./conversation.js";
import { byId } from "./dom.js";
import { failureView } from "./failure_view.js";
import { drawnPicture, forget } from "./pictures.js";
import { listenToSettings, loadModels, settingsNow } from "./settings.js";
import { TurnView } from "./turn.js";

// Within this many pixels of the end, the page follows an answer as it grows.
const NEAR_END = 120;
// Pixels kept free below a growing text.
const MARGIN = 48;
const scroller = byId("scroller");
let turns = [];
let running = null;
let following = true;

const composer = new Composer({
  onAsk: (draft) => begin(draft, (turn) => turn.ask()),
  onCompare: (draft) => begin(draft, (turn) => turn.compare()),
  onChange: showState,
});

/** Adds a turn for the draft, unless an answer is under way. */
async function begin(draft, how) {
  if (running || !(await haveModels()) || running) return;
  const history = turns.map((turn) => turn.past).filter(Boolean);
  const question = questionOf(draft.text, draft.pictures, history, settingsNow());
  const turn = new TurnView(question, { start, onGrowth: follow });
  turns.push(turn);
  byId("log").append(turn.element);
  composer.clear();
  following = true;
  await how(turn);
}

/** Runs `work(signal)` as the one thing under way. */
async function start(work) {
  if (running) return;
  const own = new AbortController();
  running = own;
  showState();
  try {
    await work(own.signal);
  } finally {
    if (running === own) running = null;
    showState();
  }
}

function stop() {
  running?.abort();
}

function startAnew() {
  stop();
  for (const { question } of turns) question.pictures.forEach(forget);
  turns = [];
  byId("log").replaceChildren();
  showState();
  byId("question").focus();
}

/** Whether it is known what is served; says why not otherwise. */
async function haveModels() {
  try {
    if (!byId("model").value) await loadModels();
    byId("notice").replaceChildren();
    return true;
  } catch (fault) {
    byId("notice").replaceChildren(failureView(fault, haveModels));
    showState();
    return false;
  }
}

function showState() {
  const busy = running !== null;
  const { text, pictures } = composer.draft;
  byId("send").hidden = busy;
  byId("stop").hidden = !busy;
  byId("send").disabled = !text && !pictures.length;
  byId("compare").disabled = busy || (!text && !pictures.length) || !anyPictures(pictures);
  byId("welcome").hidden = turns.length > 0;
  document.body.classList.toggle("busy", busy);
}

const anyPictures = (pictures) => pictures.length > 0 || turns.some(({ question }) => placedPictures(question).length);

/** Keeps the end of a growing text in sight, and its turn's beginning as long as both fit. */
function follow(turn, grown) {
  if (!following) return;
  const top = scroller.getBoundingClientRect().top - scroller.scrollTop;
  const beginning = turn.getBoundingClientRect().top - top;
  const end = grown.getBoundingClientRect().bottom - top + MARGIN;
  scroller.scrollTop = Math.max(beginning, end - scroller.clientHeight);
}

const nearEnd = () => scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < NEAR_END;

async function takeSample() {
  await composer.add([await drawnPicture()]);
  byId("question").value ||= "What shape is it?";
  composer.changed();
}

// Whoever scrolls up while an answer grows wants to read there.
scroller.addEventListener("wheel", ({ deltaY }) => {
  following = deltaY > 0 ? following || nearEnd() : false;
}, { passive: true });

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !byId("settings").open) stop();
});
byId("stop").addEventListener("click", () => {
  stop();
  byId("question").focus();
});
byId("new-chat").addEventListener("click", startAnew);
byId("sample").addEventListener("click", takeSample);
listenToSettings(haveModels);
showState();
haveModels();
byId("question").focus();
