"use strict";
// Everything shown comes from /pd/status and /pd/requests, and goes in as text, never as HTML.

const STATUS_MS = 1000, REQUESTS_MS = 2000, KEY = "pdnode-key", FAR_PAIRS = 6;
const SVG = "http://www.w3.org/2000/svg";
const PHASES = {
  front: "front end", queued: "waiting for the engine", prefill: "prefill",
  handoff: "KV hand-off", decode: "decode", lost: "on an engine that died",
};
const $ = (id) => document.getElementById(id);
let status = null, chosen = null, opened = null, requests = null;

// --- elements ---------------------------------------------------------------------------------

function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  return fill(node, attributes, children);
}
function draw(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}
function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== false && value != null) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child != null).map(String0));
  return node;
}
const String0 = (child) => (child instanceof Node ? child : String(child));
function text(node, value) {  // only when it changes: no flicker, no lost selection
  if (node.textContent !== String(value)) node.textContent = value;
}

// --- numbers ----------------------------------------------------------------------------------

const count = (n) => n.toLocaleString("en");
function ms(value) {
  if (value == null) return "–";
  if (value >= 10000) return (value / 1000).toFixed(1) + " s";
  return value.toFixed(value < 10 ? 2 : value < 100 ? 1 : 0) + " ms";
}
function seconds(s) {
  if (s < 120) return Math.round(s) + " s";
  return s < 7200 ? Math.round(s / 60) + " min" : Math.round(s / 3600) + " h";
}
function bytes(n) {
  for (const unit of ["B", "kB", "MB", "GB", "TB"]) {
    if (n < 1000 || unit === "TB") return (n < 10 && unit !== "B" ? n.toFixed(1) : Math.round(n)) + " " + unit;
    n /= 1000;
  }
}

// --- talking to the node ----------------------------------------------------------------------

class NoKey extends Error {}
async function ask(path, body) {
  const headers = {};
  const key = sessionStorage.getItem(KEY);
  if (key) headers.authorization = "Bearer " + key;
  if (body) headers["content-type"] = "application/json";
  const answer = await fetch(path, {
    headers, method: body ? "POST" : "GET", body: body && JSON.stringify(body), cache: "no-store",
  });
  if (answer.status === 401) throw new NoKey();
  const said = await answer.json();
  if (!answer.ok) throw new Error(said.error?.message ?? said.detail ?? "status " + answer.status);
  return said;
}

function say(message, bad) {
  text($("said"), message);
  $("said").className = bad ? "bad" : "";
}

async function order(path, body, done) {
  try {
    show(await ask(path, body));
    say(done);
  } catch (error) {
    if (error instanceof NoKey) askKey();
    else say(error.message, true);
  }
}

// A round of polling has one key. It ends with the key's refusal or with a newer round, and what it
// still hears then is nobody's: a late refusal of an old key must not take the new one away.
let failing = false, round = 0;
async function poll(path, every, take, mine) {
  try {
    if (!document.hidden) {
      const said = await ask(path);
      if (mine !== round) return;
      take(said);
      $("key-form").hidden = true;
      $("main").hidden = false;
      if (failing) say("");
      failing = false;
    }
  } catch (error) {
    if (mine !== round) return;
    if (error instanceof NoKey) { askKey(); return; }
    failing = true;
    say("The node does not answer; trying again. The numbers below are old.", true);
    text($("state"), "no answer");
    $("state").className = "chip bad";
  }
  setTimeout(poll, every, path, every, take, mine);
}

function askKey() {
  round++;
  $("main").hidden = true;
  text($("key-wrong"), sessionStorage.getItem(KEY) ? "That key is not this node's." : "");
  sessionStorage.removeItem(KEY);
  $("key-form").hidden = false;
  $("key").focus();
}
$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, $("key").value);
  $("key").value = "";
  $("key-form").hidden = true;
  begin();
});

// --- the box ----------------------------------------------------------------------------------

const cards = new Map();
const DOWN = ["dead", "failed", "stopped"];

function card(engine) {
  const part = {};
  for (const name of ["state", "device", "load", "hits", "restarts", "kv"]) part[name] = make("span");
  part.meter = make("meter", { min: 0, max: 1, low: 0.8, high: 0.95, optimum: 0, "aria-label": "KV in use" });
  part.error = make("div", { class: "error", hidden: "" });
  part.role = make("button", { type: "button" });
  part.drain = make("button", { type: "button" });
  part.root = make("article", { class: "card", tabindex: "-1", "aria-label": engine.id },
    make("div", {}, make("strong", {}, engine.id), part.state, " ", part.device),
    make("div", { class: "buttons" }, part.role, part.drain),
    make("div", { class: "facts" }, part.load, make("span", {}, "KV ", part.meter, " ", part.kv), part.hits, part.restarts),
    part.error);
  part.device.className = "quiet";
  for (const [on, off] of [["mouseenter", "mouseleave"], ["focusin", "focusout"]]) {
    part.root.addEventListener(on, () => { chosen = engine.id; wires(); });
    part.root.addEventListener(off, () => { chosen = null; wires(); });
  }
  return part;
}

function showEngine(engine) {
  if (!cards.has(engine.id)) cards.set(engine.id, card(engine));
  const part = cards.get(engine.id);
  const column = $(engine.role);
  if (part.root.parentNode !== column) {
    const focused = part.root.contains(document.activeElement) ? document.activeElement : null;
    const after = [...column.children].find((other) => other.ariaLabel > engine.id);
    column.insertBefore(part.root, after ?? null);
    focused?.focus();
  }
  const down = DOWN.includes(engine.state);
  const ready = engine.state === "ready";
  part.root.className = "card " + (ready ? "ready" : down ? "down" : "rising");
  text(part.state, engine.draining ? engine.state + ", draining" : engine.state);
  part.state.className = ready && !engine.draining ? "good" : down ? "bad" : "warn";
  text(part.device, engine.device);
  // What a dead engine said last is not how it is.
  part.load.hidden = part.kv.parentNode.hidden = down;
  text(part.load, `${engine.running} running, ${engine.waiting} waiting`);
  const used = engine.kv_blocks_total ? 1 - engine.kv_blocks_free / engine.kv_blocks_total : 0;
  part.meter.value = used;
  text(part.kv, `${Math.round(used * 100)} %`);
  const rate = engine.prefix_cache_queries ? engine.prefix_cache_hits / engine.prefix_cache_queries : null;
  text(part.hits, rate == null ? "no hits yet" : `hit rate ${Math.round(rate * 100)} %`);
  text(part.restarts, engine.restarts === 1 ? "1 restart" : `${engine.restarts} restarts`);
  part.restarts.className = engine.restarts ? "warn" : "quiet";
  part.error.hidden = ready || !engine.last_error;
  text(part.error, engine.last_error ?? "");
  const other = engine.role === "prefill" ? "decode" : "prefill";
  text(part.role, `→ ${other}`);
  part.role.setAttribute("aria-label", `Send ${engine.id} ${other} work`);
  part.role.onclick = () => order("/pd/role", { engine: engine.id, role: other },
    `${engine.id} is sent ${other} work now.`);
  text(part.drain, engine.draining ? "Take work" : "Drain");
  part.drain.setAttribute("aria-label", engine.draining ? `Send ${engine.id} work again` : `Send ${engine.id} no new work`);
  part.drain.onclick = () => order("/pd/drain", { engine: engine.id, drain: !engine.draining },
    engine.draining ? `${engine.id} is sent work again.` : `${engine.id} is sent no new work; what runs there goes on.`);
}

function wires() {
  const svg = $("wires"), frame = svg.getBoundingClientRect();
  const most = Math.max(1, ...status.paths.map((path) => path.handoffs));
  const labels = status.paths.length <= FAR_PAIRS || chosen;
  const away = new Set(status.engines.filter((engine) => DOWN.includes(engine.state)).map((engine) => engine.id));
  const lines = [], names = [];
  const seen = {};
  for (const path of status.paths) {
    const from = cards.get(path.from)?.root.getBoundingClientRect();
    const to = cards.get(path.to)?.root.getBoundingClientRect();
    if (!from || !to || from.left === to.left) continue;
    const right = from.left < to.left;
    const y1 = from.top + from.height / 2 - frame.top, y2 = to.top + to.height / 2 - frame.top;
    const x1 = right ? 0 : frame.width, x2 = right ? frame.width : 0;
    const mine = chosen === path.from || chosen === path.to;
    lines.push(draw("path", {
      d: `M${x1} ${y1} C${frame.width / 2} ${y1} ${frame.width / 2} ${y2} ${x2} ${y2}`,
      "stroke-width": 1 + 4 * path.handoffs / most,
      class: (away.has(path.from) || away.has(path.to) ? "away " : path.handoffs ? "used " : "") + (mine ? "chosen" : ""),
    }));
    if (labels && (!chosen || mine)) {
      const at = chosen ? 0.85 : 0.25 + 0.5 * ((seen[path.from] = (seen[path.from] ?? 0) + 1) / (status.paths.length + 1));
      const there = chosen === path.to ? 1 - at : at;
      names.push(draw("text", { x: x1 + (x2 - x1) * there, y: curve(y1, y2, there) - 4 }, `${path.gb_per_s} GB/s`));
    }
  }
  svg.classList.toggle("chosen", chosen != null);
  svg.replaceChildren(...lines, ...names);
}
// y of the Bézier whose x runs nearly evenly
const curve = (y1, y2, t) => y1 + (y2 - y1) * (3 * t * t - 2 * t * t * t);

function pathsTable() {
  const from = [...new Set(status.paths.map((path) => path.from))];
  const to = [...new Set(status.paths.map((path) => path.to))];
  const at = new Map(status.paths.map((path) => [path.from + " " + path.to, path]));
  const rows = [make("tr", {}, make("th", {}, "from \\ to"), ...to.map((name) => make("th", { scope: "col", class: "n" }, name)))];
  for (const name of from) {
    rows.push(make("tr", {}, make("th", { scope: "row" }, name), ...to.map((other) => {
      const path = at.get(name + " " + other);
      return make("td", { class: "n" }, path ? `${path.gb_per_s} · ${count(path.handoffs)}` : "");
    })));
  }
  $("paths").replaceChildren($("paths").caption, make("tbody", {}, ...rows));
  const speeds = status.paths.map((path) => path.gb_per_s);
  const kinds = [...new Set(status.paths.map((path) => path.kind))].join(", ");
  const c = status.counters;
  const live = c.handoffs && c.handoff_seconds ? `; ${bytes(c.handoff_bytes / c.handoff_seconds)}/s in ${count(c.handoffs)} hand-offs of ${bytes(c.handoff_bytes)}` : "";
  text($("paths-said"), speeds.length
    ? `${speeds.length} path${speeds.length > 1 ? "s" : ""} (${kinds}): ${[...new Set([Math.min(...speeds), Math.max(...speeds)])].join(" to ")} GB/s at the start${live}.`
    : "No paths: every engine works alone.");
}

// --- faults -----------------------------------------------------------------------------------

function reasonsTable() {
  const c = status.counters;
  const sum = (name) => status.engines.reduce((total, engine) => total + (engine[name] ?? 0), 0);
  const faults = [
    ["requests that failed", c.failed], ["requests resumed after a death", c.resumes],
    ["copies of KV that failed", c.load_failures], ["copies thrown away, KV replaced", sum("stale_reads")],
    ["leases that expired", c.leases_expired], ["not offered, index full", sum("index_full")],
    ["prompt tokens computed again", c.recomputed_prompt_tokens],
  ];
  const rows = Object.entries(c.single_engine_reasons).sort((a, b) => b[1] - a[1])
    .map(([reason, n]) => make("tr", {}, make("td", {}, "one engine: " + reason), make("td", { class: "n" }, count(n))));
  for (const [name, n] of faults) {
    rows.push(make("tr", { class: n ? "warn" : "quiet" }, make("td", {}, name), make("td", { class: "n" }, count(n))));
  }
  $("reasons").replaceChildren(make("tbody", {}, ...rows));
}

// --- everything from /pd/status ------------------------------------------------------------------

function show(now) {
  status = now;
  text($("model"), now.model);
  document.title = `pdnode: ${now.model}`;
  const down = now.engines.filter((engine) => engine.state !== "ready").length;
  const state = now.draining ? "stopping" : !now.ready ? "starting" : down ? `${down} of ${now.engines.length} engines down` : "ready";
  text($("state"), state);
  $("state").className = "chip " + (state === "ready" ? "good" : "warn");
  const totals = { up: seconds(now.uptime_s), requests: count(now.counters.requests), "hand-offs": count(now.counters.handoffs),
    resumed: count(now.counters.resumes), failed: count(now.counters.failed) };
  if ($("totals").children.length === 0) {
    $("totals").append(...Object.keys(totals).map((name) => make("div", {}, make("dt", {}, name), make("dd"))));
  }
  Object.values(totals).forEach((value, i) => text($("totals").children[i].lastChild, value));
  $("main").hidden = false;
  now.engines.forEach(showEngine);
  for (const role of ["prefill", "decode"]) {
    const empty = $(role).querySelector(".empty"), any = $(role).querySelector(".card");
    if (any && empty) empty.remove();
    if (!any && !empty) $(role).append(make("p", { class: "empty" }, `No ${role} engine: the others do all of it.`));
  }
  wires();
  pathsTable();
  reasonsTable();
  const victim = now.engines.find((engine) => engine.role === "decode" && engine.pid) ?? now.engines[0];
  text($("kill"), victim.pid ? `kill -9 ${victim.pid}` : "kill -9 PID");
}

// --- latencies --------------------------------------------------------------------------------

function chart(svg, said, buckets, name, spanS) {
  const width = svg.clientWidth || 400, height = svg.clientHeight || 150, left = 52, bottom = 18;
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  const points = buckets.filter((bucket) => bucket[name + "_p50"] != null);
  const top = nice(Math.max(1, ...points.map((bucket) => bucket[name + "_p99"])));
  const x = (age) => left + (width - left - 6) * (1 - age / spanS);
  const y = (value) => (height - bottom) * (1 - value / top) + 4;
  const shapes = [0, 0.5, 1].flatMap((share) => [
    draw("line", { x1: left, x2: width, y1: y(top * share), y2: y(top * share) }),
    draw("text", { x: left - 6, y: y(top * share) + 4, "text-anchor": "end" }, ms(top * share)),
  ]);
  shapes.push(draw("text", { x: left, y: height - 2 }, `${Math.round(spanS / 60)} min ago`),
    draw("text", { x: width - 4, y: height - 2, "text-anchor": "end" }, "now"));
  for (const quantile of ["p99", "p50"]) {
    const line = points.map((bucket) => `${x(bucket.age_s).toFixed(1)},${y(bucket[name + "_" + quantile]).toFixed(1)}`);
    shapes.push(draw("polyline", { class: quantile, points: line.join(" ") }));
    for (const point of line) {
      const [cx, cy] = point.split(",");
      shapes.push(draw("circle", { class: quantile, r: 2, cx, cy }));
    }
  }
  svg.replaceChildren(...shapes);
  const last = points.at(-1);
  text(said, last ? `p50 ${ms(last[name + "_p50"])} (solid), p99 ${ms(last[name + "_p99"])} (dashed) in the newest 5 s with answers` : "no answers in the last 5 minutes");
}
function nice(value) {
  const step = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((factor) => factor * step).find((limit) => limit >= value);
}

// --- requests ---------------------------------------------------------------------------------

function bar(phases, scale) {
  const svg = draw("svg", { class: "bar", viewBox: "0 0 1000 14", preserveAspectRatio: "none", role: "img" });
  for (const phase of phases) {
    const x = phase.begin_ms / scale * 1000, width = (phase.end_ms - phase.begin_ms) / scale * 1000;
    svg.append(draw("rect", { class: phase.phase, x, y: 0, height: 14, width: Math.max(width, 0.8) },
      draw("title", {}, `${PHASES[phase.phase]} ${ms(phase.end_ms - phase.begin_ms)}${phase.engine ? " on " + phase.engine : ""}`)));
  }
  svg.setAttribute("aria-label", phases.map((phase) => `${PHASES[phase.phase]} ${ms(phase.end_ms - phase.begin_ms)}`).join(", "));
  return svg;
}

const end = (request) => request.phases.at(-1)?.end_ms ?? 1;

function showRequests(now) {
  requests = now;
  chart($("ttft"), $("ttft-now"), now.latency.buckets, "ttft_ms", 300);
  chart($("itl"), $("itl-now"), now.latency.buckets, "itl_ms", 300);
  const rows = now.requests.flatMap((asked) => asked.requests.map((request) => [asked, request])).slice(0, 40);
  $("no-requests").hidden = rows.length > 0;
  const longest = Math.max(1, ...rows.map(([, request]) => end(request)));
  const own = $("own-scale").checked, had = document.activeElement?.dataset?.request;
  const body = [];
  for (const [asked, request] of rows) {
    const engines = request.prefill && request.prefill !== request.decode ? `${request.prefill} → ${request.decode}` : request.decode ?? "–";
    const open = opened === request.request_id;
    const name = make("button", { type: "button", "data-request": request.request_id, "aria-expanded": String(open), title: asked.id,
      onclick: () => { opened = open ? null : request.request_id; showRequests(requests); } }, asked.id);
    const bad = request.state === "failed" || request.state === "aborted";
    body.push(make("tr", {}, make("td", {}, name),
      make("td", {}, new Date(asked.received_at * 1000).toLocaleTimeString()),
      make("td", {}, engines), make("td", {}, request.reason || "split"),
      make("td", { class: "n" }, count(request.prompt_tokens)),
      make("td", { class: "n" + (bad ? " bad" : "") }, bad ? request.state : count(request.output_tokens) + (request.state === "running" ? "…" : "")),
      make("td", { class: "n" }, ms(request.ttft?.ms)), make("td", { class: "n" }, ms(request.itl_ms)),
      make("td", { class: "wide" }, bar(request.phases, own ? end(request) : longest))));
    if (open) body.push(make("tr", { class: "detail" }, make("td", { colspan: 9 }, ...detail(asked, request))));
  }
  $("requests").tBodies[0].replaceChildren(...body);
  if (had) document.querySelector(`[data-request="${CSS.escape(had)}"]`)?.focus();
}

function pairs(entries) {
  return make("div", {}, ...entries.map(([name, value]) => make("span", {}, make("span", { class: "quiet" }, name + " "), value)));
}

function detail(asked, request) {
  const lines = [
    pairs([["request", request.request_id], ["path", asked.path], ["status", asked.status ?? "–"], ["state", request.state],
      ["cached", count(request.cached_tokens) + " tokens"], ["deaths", request.deaths], ["longest gap", ms(request.longest_gap_ms)]]),
    pairs(Object.entries(request.events_ms).filter(([, at]) => at != null).sort((a, b) => a[1] - b[1])
      .map(([name, at]) => [name.replace("_", " "), ms(at)])),
  ];
  if (request.ttft) lines.push(pairs(Object.entries(request.ttft).map(([name, value]) => [name === "ms" ? "to first token" : name.replace("_ms", ""), ms(value)])));
  if (request.handoff) {
    const h = request.handoff;
    lines.push(pairs([["hand-off", `${h.from} → ${h.to}, ${bytes(h.bytes)} in ${ms(h.ms)}, ${h.gb_per_s ?? "–"} GB/s`]]));
  }
  if (request.estimates) {
    lines.push(pairs(Object.entries(request.estimates).filter(([, value]) => value != null)
      .map(([name, value]) => ["estimated " + name.replace("_ms", ""), name.endsWith("_ms") ? ms(value) : count(Math.round(value))])));
  }
  return lines;
}

// --- begin ------------------------------------------------------------------------------------

$("legend").append(...Object.entries(PHASES).map(([phase, name]) => make("span", {}, make("i", { class: phase }), name)));
$("own-scale").addEventListener("change", () => requests && showRequests(requests));
addEventListener("resize", () => { if (status) wires(); if (requests) showRequests(requests); });
function begin() {
  round++;
  poll("/pd/status", STATUS_MS, show, round);
  poll("/pd/requests", REQUESTS_MS, showRequests, round);
}
begin();
