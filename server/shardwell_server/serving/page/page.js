// Shows what the coordinator's rpcs say, again and again. Every value becomes the text of a node, never markup.

const INTERVAL_MS = 2000, SLOW_EVERY = 5, SHOWN_STEPS = 80, KEPT_EVENTS = 1000, KEPT_LOGGED = 500, LEAST_SLOTS = 20;
const SVG = new Set(["svg", "rect", "path", "line"]);
const ROUTINE = new Set(["step_committed", "unit_placed", "unit_published"]);
const TROUBLE = /lost|ended|failed|expired|cut_off|corrupt|damaged|rolled_back|delayed|differ|missing|unreachable/;
const PARTS = ["compute", "gather_wait", "update_wait", "push", "finish_wait", "commit_wait", "optimizer",
  "pipeline_bubble", "data", "between_steps"];
const WORK = { VACANT: ["vacant", "bad"], LEASED: ["computing", "busy"], FINISHED: ["finished", "good"] };
const STATUS = { running: "good", finished: "quiet", idle: "quiet", waiting: "warn", loading: "warn", stalled: "bad" };

const $ = (selector) => document.querySelector(selector);
const needsToken = document.documentElement.dataset.needsToken === "true";
const token = () => sessionStorage.getItem("token") ?? "";
const selected = () => decodeURIComponent(location.hash.match(/^#\/run\/(.+)$/)?.[1] ?? "") || null;
// isOperator: until the coordinator refuses an rpc that is for operators. at: the answers for what is selected.
const kept = { isOperator: true, at: {}, cursors: {}, showsRoutine: false, failedSince: 0, clockOffset: 0 };

// ---- rpcs ----

async function ask(rpc, fields = {}) {
  const headers = token() ? { Authorization: `Bearer ${token()}` } : {};
  const options = { headers, signal: AbortSignal.timeout(15000) };
  const response = await fetch(`api/${rpc}?${new URLSearchParams(fields)}`, options);
  const answer = await response.json();
  kept.clockOffset = Date.parse(response.headers.get("date")) - Date.now() || 0;
  if (!response.ok) throw Object.assign(new Error(answer.message), { status: response.status });
  return answer;
}

// The error is an answer, too: the rest of the page is shown.
const askOrError = (rpc, fields) => ask(rpc, fields).catch((error) => {
  if (error.status === undefined || error.status === 401) throw error;
  return { error: error.message };
});

async function askRuns(at) {
  if (kept.isOperator) {
    try {
      at.cluster = await ask("DescribeCluster");
      return void (at.runs = at.cluster.runs.map((health) => health.summary));
    } catch (error) {
      if (error.status !== 403) throw error;
      kept.isOperator = false;
    }
  }
  at.runs = (await ask("ListRuns")).runs;
}

async function askRun(at, run) {
  const members = JSON.stringify(at.run?.trainers.map((each) => [each.trainer, each.live, each.global_ranks]));
  const isSlowTurn = at.turn++ % SLOW_EVERY === 0 || members !== at.members;
  at.members = members;
  [at.run, at.stall, at.performance, at.readers, at.world, at.units] = await Promise.all([
    ask("DescribeRun", { run }), askOrError("ExplainStall", { run }),
    ask("DescribePerformance", { run, logged_count: at.logged.length ? 50 : KEPT_LOGGED }),
    askOrError("ListReaders", { run }),
    isSlowTurn ? askOrError("DescribeWorld", { run }) : at.world,
    isSlowTurn ? askOrError("ListUnits", { run }) : at.units,
  ]);
  const from = Number(at.performance.logged[0]?.step ?? Infinity); // after a rollback, steps are committed again
  at.logged = [...at.logged.filter((each) => Number(each.step) < from), ...at.performance.logged].slice(-KEPT_LOGGED);
}

async function askEvents(at, run) {
  const fields = { ...(run && { run }), ...(at.events.length && { after: at.events.at(-1).time }) };
  at.events = [...at.events, ...(await ask("WatchEvents", fields)).events].slice(-KEPT_EVENTS);
}

let running = null; // two refreshes at once would show an event twice
const refresh = () => (running ??= askAll().finally(() => (running = null)));

async function askAll() {
  if (document.hidden || (needsToken && !token())) return;
  const run = selected(), isKnown = kept.at.runs && kept.at.name === run;
  const at = isKnown ? kept.at : { name: run, events: [], logged: [], turn: 0 };
  try {
    await askRuns(at);
    if (!location.hash && at.runs.length === 1) return location.replace(linkTo(at.runs[0].run));
    if (run) await askRun(at, run);
    if (run || kept.isOperator) await askEvents(at, run);
    kept.failedSince = 0;
    report("");
  } catch (error) {
    if (error.status === 401) return signOut(error.message);
    kept.failedSince ||= Date.now();
    const passed = Math.round((Date.now() - kept.failedSince) / 1000);
    report(error.status ? error.message : `The coordinator has not answered for ${passed} s. This page tries again.`);
  }
  if (selected() === run && (!needsToken || token())) {
    kept.at = at;
    render();
  }
}

function report(message) {
  $("#problem").textContent = message;
  $("#problem").hidden = !message;
}

function signOut(message) {
  sessionStorage.removeItem("token");
  Object.assign(kept, { isOperator: true, at: {}, failedSince: 0 });
  report(message);
  render();
  $("#token").focus();
}

// ---- nodes ----

function h(tag, attributes = {}, ...children) {
  const node = SVG.has(tag) ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) if ((value ?? "") !== "") node.setAttribute(name, value);
  node.append(...children.flat(Infinity).filter((child) => (child ?? "") !== ""));
  return node;
}

// Makes a node equal to another one, and keeps what the user has focused, opened or scrolled.
function morph(from, to) {
  if (from.nodeName !== to.nodeName || from.dataset?.key !== to.dataset?.key) return from.replaceWith(to);
  if (from.nodeType === Node.TEXT_NODE) return void (from.data === to.data || (from.data = to.data));
  const gone = [...from.attributes].filter(({ name }) => !to.hasAttribute(name) && name !== "open");
  for (const { name } of gone) from.removeAttribute(name);
  for (const { name, value } of to.attributes) if (from.getAttribute(name) !== value) from.setAttribute(name, value);
  const [old, wanted] = [[...from.childNodes], [...to.childNodes]];
  wanted.forEach((child, index) => (old[index] ? morph(old[index], child) : from.append(child)));
  old.slice(wanted.length).forEach((child) => child.remove());
}

const linkTo = (run) => `#/run/${encodeURIComponent(run)}`;
const quiet = (...text) => h("span", { class: "quiet" }, text);
const small = (text, kind = "quiet") => (text ? h("small", { class: kind }, text) : null);
const section = (title, ...children) => h("section", { "data-key": title }, h("h2", {}, title), children);
const note = (text) => h("p", { class: "quiet" }, text);
const items = (texts) => texts.map((each) => h("li", {}, each));
const list = (texts, kind = "") => (texts.length ? h("ul", { class: kind }, items(texts)) : null);
const more = (names, shown) => [names.slice(0, shown).join(", "), names.length > shown && names.length - shown + " more"]
  .filter(Boolean).join(" and ");

function table(name, headings, rows, kind = "") {
  const cell = (content) => (/^T[DH]$/.test(content.nodeName) ? content : h("td", {}, content));
  return h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": name }, h("table", { class: kind },
    h("thead", {}, h("tr", {}, headings.map((each) => h("th", { scope: "col" }, each)))),
    h("tbody", {}, rows.map((row) => h("tr", {}, row.map(cell))))));
}

// ---- values ----

function seconds(value) {
  if (value < 1) return `${Number((value * 1000).toPrecision(3))} ms`;
  if (value < 120) return `${value.toFixed(value < 10 ? 2 : 1)} s`;
  const [unit, length] = value < 7200 ? ["min", 60] : value < 172800 ? ["h", 3600] : ["d", 86400];
  return `${Math.round(value / length)} ${unit}`;
}
function bytes(value) {
  const unit = Math.min(4, Math.floor(Math.log2(Math.max(1, value)) / 10)), number = value / 1024 ** unit;
  return `${unit && number < 100 ? number.toFixed(1) : Math.round(number)} ${["B", "KiB", "MiB", "GiB", "TiB"][unit]}`;
}
function ago(time) {
  const passed = (Date.now() + kept.clockOffset - Date.parse(time)) / 1000;
  return passed < 2 ? "just now" : `${seconds(passed)} ago`;
}
const compact = (value) => Number(value).toLocaleString("en", { maximumSignificantDigits: 4 });
const count = (value) => Number(value).toLocaleString("en");
const shardsText = (number, size) => (number ? `${number} (${bytes(size)})` : "–");
const plain = (name, prefix = "") => name.replace(prefix, "").toLowerCase().replaceAll("_", " ");
const axesOf = (world) => ["dp", ...(world.cp > 1 ? ["cp"] : []), "tp", "pp"];
const worldText = (world) => axesOf(world).map((axis) => `${axis} ${world[axis]}`).join(" · ");
const sizeOf = (world) => axesOf(world).reduce((product, axis) => product * world[axis], 1);
const trainersText = ({ live_trainer_count: live, config: { world } }) => `${live} of ${sizeOf(world)}`;
const statusOf = (summary) => plain(summary.status, "RUN_STATUS_");
const statusNode = (summary) => h("span", { class: `state ${STATUS[statusOf(summary)] ?? ""}` }, statusOf(summary));

// ---- charts ----

// Points have x, y, and perhaps a note and a kind. A cursor follows the pointer, or the arrow keys.
function chart(title, points, format, bars = false) {
  if (!points.length) return null;
  const values = points.map((each) => each.y), top = Math.max(...values), low = bars ? 0 : Math.min(...values);
  const width = 1000 / Math.max(points.length, LEAST_SLOTS), middle = (index) => (index + 0.5) * width;
  const y = (value) => (top === low ? 50 : 96 - (92 * (value - low)) / (top - low));
  const cursor = Math.min(kept.cursors[title] ?? Infinity, points.length - 1), at = points[cursor];
  const path = points.map((each, index) => `${index ? "L" : "M"}${middle(index)} ${y(each.y)}`).join("");
  const bar = (each, index) => h("rect", { class: `bar ${each.kind}`, x: index * width + width * 0.12,
    width: width * 0.76, y: y(each.y), height: 100 - y(each.y) });
  const fixed = { "vector-effect": "non-scaling-stroke" };
  return h("section", { "data-key": title }, h("figure", {},
    h("figcaption", {}, h("h2", {}, title),
      h("output", { class: at.kind }, `step ${at.x}: ${format(at.y)}${at.note ? `, ${at.note}` : ""}`)),
    h("div", { class: "plot" },
      h("div", { class: "y" }, h("span", {}, format(top)), h("span", {}, top === low ? "" : format(low))),
      h("svg", { viewBox: "0 0 1000 100", preserveAspectRatio: "none", tabindex: 0, role: "img", "data-chart": title,
        "data-count": points.length, "aria-label": `${title}. Arrow keys move through ${points.length} steps` },
      bars ? points.map(bar) : h("path", { class: "line", d: points.length > 1 ? path : `${path}h0`, ...fixed }),
      kept.cursors[title] === undefined ? null
        : h("line", { class: "cursor", x1: middle(cursor), x2: middle(cursor), y1: 0, y2: 100, ...fixed })),
      h("div", { class: "x" }, h("span", {}, `step ${points[0].x}`),
        points.length < LEAST_SLOTS ? null : h("span", {}, points.at(-1).x)))));
}

// The time from each commit to the next, and what else happened in it.
function stepTimes(events) {
  const points = [];
  let before = null, notes = [];
  for (const event of events) {
    if (TROUBLE.test(event.kind)) notes.push(plain(event.kind));
    if (event.kind !== "step_committed") continue;
    const time = Date.parse(event.time), note = [...new Set(notes)].join(", ");
    const step = event.message.match(/^step (\d+)/)?.[1];
    if (before !== null) points.push({ x: step, y: (time - before) / 1000, note, kind: note && "warn" });
    [before, notes] = [time, []];
  }
  return points.slice(-SHOWN_STEPS);
}

function loggedCharts(logged) {
  const names = [...new Set(logged.flatMap((each) => Object.keys(each.means)))].sort();
  names.sort((one, other) => other.includes("loss") - one.includes("loss"));
  const points = (name) => logged.map((each) => ({ x: each.step, y: Number(each.means[name]) }));
  return names.slice(0, 6).map((name) => chart(name, points(name).filter((each) => Number.isFinite(each.y)), compact));
}

// ---- a run ----

function facts({ run: { summary, grad_norm: norm, checkpoints: { last_saved: saved } }, performance, logged }) {
  const loss = logged.at(-1)?.means.loss, missing = summary.missing_backup_count, wanted = summary.config.backups;
  return h("dl", { class: "facts" }, [
    ["Committed step", count(summary.committed_step), summary.last_commit ? ago(summary.last_commit) : "none yet"],
    ["Time per step", summary.step_s ? seconds(summary.step_s) : "–"],
    performance.tokens_per_s ? ["Tokens/s", compact(performance.tokens_per_s)] : null,
    performance.samples_per_s ? ["Samples/s", compact(performance.samples_per_s)] : null,
    loss === undefined ? null : ["Loss", compact(loss)],
    ["Gradient norm", norm ? compact(norm) : "–"],
    ["Trainers", trainersText(summary), worldText(summary.config.world)],
    ["Backups", missing ? h("span", { class: "bad" }, `${missing} missing`) : wanted ? `${wanted} per shard` : "none"],
    ["Checkpoint", saved ? `step ${saved.step}` : "none", saved && ago(saved.ended)],
    ["Parameters", bytes(summary.parameter_bytes), `${summary.unit_count} units`],
  ].filter(Boolean).map(([name, value, note]) => h("div", {}, h("dt", {}, name), h("dd", {}, value, small(note)))));
}

function rankGrid({ world: { error, world, rank_assignments: ranks }, run }) {
  if (error) return section("Ranks", note(error));
  const axes = ["pp", "cp", "tp"].filter((axis) => world[axis] > 1);
  const work = new Map(run.work.map((each) => [each.item.global_rank, each]));
  const places = ranks.map((each) => ({ trainer: each.trainer, ...each.rank_assignment.coordinates }));
  const column = (at) => axes.reduce((sum, axis) => sum * 65536 + at[`${axis}_rank`], 0);
  const first = places.filter((at) => at.dp_rank === 0).sort((one, other) => column(one) - column(other));
  const cells = new Map(places.map((at) => [`${at.dp_rank} ${column(at)}`, at]));
  const cell = ({ global_rank: rank, trainer }) => {
    const found = work.get(rank), [state, kind] = WORK[found?.state.replace("WORK_STATE_", "")] ?? ["no work item", ""];
    const attempt = found?.item.attempt ? `, attempt ${found.item.attempt + 1}` : "";
    const isOther = found?.trainer && found.trainer !== trainer;
    return h("td", { class: kind },
      h("b", {}, `${rank} `), found?.trainer || trainer || h("span", { class: "bad" }, "no trainer"),
      small(found ? `${state} ${seconds(found.state_s)}, step ${found.version}${attempt}` : state),
      small(isOther ? `in place of ${trainer || "a lost trainer"}` : "", "warn"));
  };
  const rows = Array.from({ length: world.dp }, (_, dp) => [h("th", { scope: "row" }, `dp ${dp}`),
    ...first.map((at) => cell(cells.get(`${dp} ${column(at)}`)))]);
  const nameOf = (at) => axes.map((axis) => `${axis} ${at[`${axis}_rank`]}`).join(" · ");
  return section("Ranks", table("Ranks", ["", ...first.map(nameOf)], rows, "ranks"));
}

function trainerTimes({ performance: { trainers }, run }) {
  const longest = Math.max(...trainers.map((each) => each.report?.step_s ?? 0));
  const members = new Map(run.trainers.map((each) => [each.trainer, each]));
  const used = PARTS.filter((part) => trainers.some((each) => each.report?.part_s[part]));
  const gone = run.trainers.filter((each) => !each.live).map((each) => each.trainer).reverse();
  const rank = (each) => each.global_ranks[0] ?? Infinity;
  const row = ({ trainer, global_ranks: ranks, report }) => {
    const member = members.get(trainer), parts = report?.part_s ?? {};
    let start = 0;
    const bars = used.filter((part) => parts[part]).map((part) => {
      const width = (100 * parts[part]) / longest;
      return h("rect", { class: part, x: `${(start += width) - width}%`, width: `${width}%`, height: "100%" });
    });
    const said = Object.entries(parts).sort((one, other) => other[1] - one[1]).slice(0, 3)
      .map(([part, value]) => `${plain(part)} ${Math.round((100 * value) / report.step_s)}%`).join(", ");
    const silent = member?.silent_s > 3 ? `, last heartbeat ${seconds(member.silent_s)} ago` : "";
    const place = ranks.length ? `rank ${ranks.join(" ")}` : "spare";
    return [h("div", { class: "head" },
      h("span", {}, h("b", {}, trainer), quiet(` ${place} on ${member?.host ?? "?"}${silent}`)),
      h("span", { class: "number" }, report ? seconds(report.step_s) : "–")),
    report ? h("svg", { role: "img", "aria-label": said }, bars) : null,
    quiet(report ? `${said} (steps ${report.first_step} to ${report.last_step})` : "no step is measured yet")];
  };
  return section("Time of each trainer's step",
    h("p", { class: "legend" }, used.map((part) => h("span", {},
      h("svg", {}, h("rect", { class: part, width: "100%", height: "100%" })), plain(part)))),
    list(trainers.toSorted((one, other) => rank(one) - rank(other)).map(row), "times") ?? note("no live trainers"),
    gone.length ? note(`Gone or left: ${more(gone, 8)}`) : null);
}

// One line per advice: that of the trainer which loses most, and the names of the others that got it, too.
function advice({ performance: { trainers } }) {
  const of = ({ trainer, report }) => (report?.bottlenecks ?? []).map((each) => ({ trainer, ...each }));
  const found = trainers.flatMap(of);
  found.sort((one, other) => other.share - one.share);
  const groups = new Map(found.map((each) => [`${each.kind} ${each.advice}`, []]));
  found.forEach((each) => groups.get(`${each.kind} ${each.advice}`).push(each));
  const said = [...groups.values()].slice(0, 10).map(([worst, ...others]) => [
    h("b", { class: /high|critical/.test(worst.severity) ? "warn" : "" }, `${worst.trainer}, ${worst.severity}: `),
    `${worst.finding}. ${worst.advice}`,
    small(others.length ? `Also ${more(others.map((each) => each.trainer), 6)}` : "")]);
  return section("Advice", list(said, "advice") ?? note("no bottlenecks"));
}

// The first cells of a server's row. Only operators see more than its name.
function serverCells(id, server) {
  if (!server) return [h("b", {}, id), "–", "–"];
  const state = plain(server.state, "SERVER_STATE_"), text = server.draining ? `${state}, draining` : state;
  const share = (100 * server.used_bytes) / Math.max(1, server.budget_bytes);
  return [[h("b", {}, id), small(server.address)],
    h("span", { class: state !== "live" ? "bad" : server.draining ? "warn" : "good" }, text),
    [`${bytes(server.used_bytes)} of ${bytes(server.budget_bytes)}`,
      h("svg", { class: "meter", role: "img", "aria-label": `${Math.round(share)}% in use` },
        h("rect", { width: `${share}%`, height: "100%" }))]];
}

function shards({ units: { error, units }, cluster }) {
  if (error) return section("Shards", note(error));
  const known = new Map((cluster?.servers ?? []).map((each) => [each.server_id, each]));
  const copies = units.flatMap(({ unit, shards: primaries, backups }) => [
    ...primaries.map((range) => ({ unit, range, letter: "P" })),
    ...backups.map(({ shard, state }) => ({ unit, range: shard, letter: state.endsWith("IN_SYNC") ? "B" : "b" })),
  ]);
  const servers = [...new Set([...known.keys(), ...copies.map((each) => each.range.server_id)])].sort();
  const on = (id, letter) => copies.filter((each) => each.range.server_id === id && each.letter === letter);
  const size = ({ range }) => Number(range.stop_bytes) - Number(range.start_bytes);
  const text = (found) => shardsText(found.length, found.reduce((sum, each) => sum + size(each), 0));
  const rows = servers.map((id) => [...serverCells(id, known.get(id)), text(on(id, "P")),
    [text(on(id, "B")), small(on(id, "b").length ? `${on(id, "b").length} not in sync` : "", "warn")]]);
  const letters = new Map(); // by unit and server
  for (const { unit, range, letter } of copies) {
    const key = `${unit}|${range.server_id}`;
    letters.set(key, new Set(letters.get(key)).add(letter));
  }
  const cell = (unit, id) => [...(letters.get(`${unit}|${id}`) ?? "·")].join(" ");
  const matrix = units.map((each) => [each.unit, bytes(each.size_bytes), ...servers.map((id) => cell(each.unit, id))]);
  return section("Shards", table("Servers", ["Server", "State", "Memory in use", "Primaries", "Backups in sync"], rows),
    h("details", { "data-key": "units" }, h("summary", {}, `Where each of the ${units.length} units is`),
      note("P: primary. B: backup in sync. b: backup that is being built or released."),
      table("Units", ["Unit", "Size", ...servers], matrix, "units")));
}

function checkpoints({ run: { checkpoints: found } }) {
  const { checkpoint_dir: folder, checkpoint_every: every, checkpoint_keep: keep } = found;
  const { in_flight: now, last_saved: saved, last_failed: failed } = found;
  const when = every ? `after every ${every} commits` : "on request";
  const rows = [
    folder && ["Saved", `${when} in ${folder}, ${keep ? `the newest ${keep} are` : "all are"} kept`],
    found.loading && ["Loading", found.loading, "warn"],
    now && ["Being written", `step ${now.step}, ${bytes(now.written_bytes)} of ${bytes(now.total_bytes)}`],
    saved && ["Newest", `step ${saved.step}, ${ago(saved.ended)}, ${bytes(saved.total_bytes)}, ${saved.url}`],
    failed && ["Failed", `step ${failed.step}, ${ago(failed.ended)}: ${failed.error}`, "bad"],
    !failed && found.problem && ["Cannot be saved", found.problem, "bad"],
    found.rollback_count && ["Rolled back", `${found.rollback_count} times`, "warn"],
  ].filter(Boolean).map(([name, value, kind = ""]) => h("p", { class: kind }, quiet(`${name}: `), value));
  return section("Checkpoints", rows.length ? rows : note("none: the run has no checkpoint_dir"));
}

function readers({ readers: { error, readers: found } }) {
  if (error) return section("Readers", note(error));
  const rows = found.map((each) => [each.name, each.host, each.version ?? "none yet", each.lag ?? "-",
    bytes(each.received_bytes), `${seconds(each.silent_s)} ago`]);
  return section("Readers", rows.length
    ? table("Readers", ["Reader", "Host", "Version", "Behind", "Received", "Last request"], rows)
    : note("none has asked for weights in the last ten minutes"));
}

function eventList({ name, events }) {
  const shown = events.filter((each) => kept.showsRoutine || !ROUTINE.has(each.kind)).slice(-200).reverse();
  const row = ({ time, kind, run, message }) => [
    h("time", { class: "quiet", datetime: time, title: new Date(time).toLocaleString() },
      new Date(time).toLocaleTimeString([], { hourCycle: "h23" })),
    h("span", { class: TROUBLE.test(kind) ? "warn" : "" }, plain(kind)),
    h("span", {}, name === null && run ? `${run}: ${message}` : message)];
  return h("section", { "data-key": "events" }, h("div", { class: "title-row" }, h("h2", {}, "Events"),
    h("label", {}, h("input", { type: "checkbox", id: "routine" }), "commits and new units, too")),
  h("ol", { class: "events", tabindex: 0, "aria-label": "Events, newest first" }, items(shown.map(row))));
}

function runPage(at) {
  const { stall, cluster, run: { summary } } = at, health = cluster?.runs.find((each) => each.summary.run === at.name);
  const isWaiting = ["waiting", "loading", "stalled"].includes(statusOf(summary)), waits = stall.waiting_for ?? [];
  const phase = stall.error ? "" : `${stall.phase} for ${seconds(stall.phase_s)}`;
  return [
    h("h1", {}, summary.run, statusNode(summary)),
    note(`${phase}${summary.created_by ? `, created by ${summary.created_by} on ${summary.created_on}` : ""}`),
    list([...(cluster?.problems ?? []), ...(health?.problems ?? [])], "lines bad"),
    isWaiting ? list(waits.map((each) => `waits: ${each}`), "lines") : null,
    facts(at),
    h("div", { class: "pair" }, loggedCharts(at.logged),
      chart("Time between commits", stepTimes(at.events), seconds, true)),
    rankGrid(at),
    !isWaiting && waits.length ? h("details", { "data-key": "waits" },
      h("summary", {}, `What step ${stall.step} waits for`), list(waits, "lines")) : null,
    h("div", { class: "pair" }, trainerTimes(at), advice(at)),
    shards(at), checkpoints(at), readers(at), eventList(at),
  ];
}

// ---- the cluster ----

function clusterPage({ cluster, runs, events, name }) {
  const ofRun = (health) => health.problems.map((each) => `${health.summary.run}: ${each}`);
  const problems = [...(cluster?.problems ?? []), ...(cluster?.runs ?? []).flatMap(ofRun)];
  const runRows = runs.map((each) => [h("a", { href: linkTo(each.run) }, each.run), statusNode(each),
    count(each.committed_step), each.step_s ? seconds(each.step_s) : "–", trainersText(each),
    worldText(each.config.world), each.last_commit ? ago(each.last_commit) : "none yet"]);
  const serverRows = (cluster?.servers ?? []).map((each) => [...serverCells(each.server_id, each),
    shardsText(each.primary_count, each.primary_bytes), shardsText(each.backup_count, each.backup_bytes),
    `${seconds(each.silent_s)} ago`]);
  const health = problems.length ? ["bad", "degraded"] : ["good", "healthy"];
  return [
    h("h1", {}, "Cluster", cluster ? h("span", { class: `state ${health[0]}` }, health[1]) : null),
    cluster ? note(`version ${cluster.shardwell_version}, term ${cluster.term}`) : null,
    list(problems, "lines bad"),
    section("Runs", runRows.length
      ? table("Runs", ["Run", "Status", "Step", "Time per step", "Trainers", "World", "Last commit"], runRows)
      : note("no runs yet: the first trainer that joins creates one")),
    cluster ? section("Servers", serverRows.length
      ? table("Servers", ["Server", "State", "Memory in use", "Primaries", "Backups", "Heartbeat"], serverRows)
      : note("no shard servers")) : null,
    cluster ? eventList({ name, events }) : null,
  ];
}

function render() {
  const { at } = kept, asks = needsToken && !token();
  const isReady = !asks && at.runs && (at.name === null || at.performance);
  $("#login").hidden = !asks;
  $("#sign-out").hidden = asks || !needsToken;
  const place = asks ? null : selected() ? h("a", { href: "#/" }, "← All runs") : h("b", {}, "Shardwell");
  morph($("nav"), h("nav", { "aria-label": "Runs" }, place));
  document.title = [!asks && selected(), isReady && at.run && statusOf(at.run.summary), "Shardwell"].filter(Boolean)
    .join(" · ");
  const nodes = isReady ? (at.name ? runPage : clusterPage)(at) : null;
  morph($("main"), h("main", { class: kept.failedSince && isReady ? "old" : null }, nodes));
}

// ---- what the user does ----

function moveCursor({ dataset }, index) {
  if (index === null) delete kept.cursors[dataset.chart];
  else kept.cursors[dataset.chart] = Math.max(0, Math.min(index, dataset.count - 1));
  render();
}
addEventListener("pointermove", ({ target, clientX }) => {
  const svg = target.closest?.("[data-chart]"), box = svg?.getBoundingClientRect();
  const slots = Math.max(svg?.dataset.count ?? 0, LEAST_SLOTS);
  if (svg) return moveCursor(svg, Math.floor(((clientX - box.left) / box.width) * slots));
  if (Object.keys(kept.cursors).length && !document.activeElement.dataset.chart) {
    kept.cursors = {};
    render();
  }
});
addEventListener("keydown", (event) => {
  const svg = event.target.closest?.("[data-chart]"), by = { ArrowLeft: -1, ArrowRight: 1, Escape: null }[event.key];
  if (!svg || by === undefined) return;
  event.preventDefault();
  moveCursor(svg, by && (kept.cursors[svg.dataset.chart] ?? Number(svg.dataset.count)) + by);
});
addEventListener("change", ({ target }) => {
  if (target.id === "routine") kept.showsRoutine = target.checked;
  render();
});
addEventListener("hashchange", () => {
  Object.assign(kept, { at: {}, cursors: {} });
  scrollTo(0, 0);
  render();
  Promise.resolve(running).then(refresh);
});
addEventListener("visibilitychange", refresh);
$("#sign-out").addEventListener("click", () => signOut(""));
$("#login").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("token", $("#token").value.trim().replace(/^(authorization:\s*)?bearer\s+/i, ""));
  $("#token").value = "";
  report("");
  refresh();
});

render();
for (;;) {
  await refresh();
  await new Promise((done) => setTimeout(done, INTERVAL_MS));
}
