// The walk over a schedule, as dpsim/model/simulate.py: when each operation starts and ends. Each rank class has a
// lane that computes, and one that communicates (queue.js).
//
// - off: collectives run only while something waits for them.
// - inline: they run on the computing thread as soon as they may start, and computation stops meanwhile.
// - thread: a fluid. Beside computation a collective progresses at 1 / overlapped and takes some computation away.
// - poll: a collective is so many stages; the end of a stage is noticed, and the next one started, at polls alone.

const WAITED_FOR = new Set(["synchronise", "receive"]);

/**
 * {start, end, ready, step_s, exposed_s}: instants of every operation in seconds. `ready` is when the gradients of a
 * backward are final, and when a send's message arrives. `exposed_s` is that of the class that waits least. `prices`
 * are those of prices.js.
 */
function walk(operations, prices, mode) {
  const count = operations.length;
  const [start, end, ready] = [0, 1, 2].map(() => new Float64Array(count));
  const [isReady, isEnded, come] = [0, 1, 2].map(() => new Uint8Array(count));
  const instants = {start, end, ready, isReady, isEnded};
  const ofClass = prices.update_s.map(() => []);
  const meetings = []; // of each: how many classes are still to come to it, and when the last one came
  const place = new Int32Array(count).fill(-1); // of collectives in the queue of their class
  const links = new Map(); // until when messages fill the link from one class to another
  operations.forEach(({rank_class = 0, meeting = -1}, i) => {
    ofClass[rank_class].push(i);
    if (meeting >= 0) (meetings[meeting] ??= {left: 0, begin: 0}).left += 1;
  });

  /** [when what a receive or a synchronisation waits for is there (Infinity: not known yet), its cost then]. */
  const awaitedS = (i, now) => {
    const {kind, peer, meeting = -1, layer, size_bytes} = operations[i];
    if (kind === "receive") {
      if (!isReady[peer]) return [Infinity, 0];
      const {seconds, copied} = prices.messages[peer];
      return copied ? [start[peer], seconds] : [ready[peer], 0];
    }
    if (meeting < 0) return [now, at(prices.sums, 0, size_bytes)];
    const met = meetings[meeting];
    if (!come[i]) {
      met.left -= 1;
      met.begin = Math.max(met.begin, now);
      come[i] = 1;
    }
    return met.left ? [Infinity, 0] : [met.begin, at(layer >= 0 ? prices.joining : prices.agreement, 0, size_bytes)];
  };
  const send = (i, own, now) => {
    const link = `${own},${operations[operations[i].peer].rank_class}`;
    ready[i] = Math.max(now, links.get(link) ?? 0) + prices.messages[i].seconds;
    links.set(link, ready[i]);
  };

  const walked = {operations, prices, mode, instants, place, awaitedS, send};
  let walking = ofClass.map((rows, own) => classOf(walked, rows, own));
  const all = walking;
  while (walking.length) {
    if (!walking.map((each) => each.advance()).some(Boolean)) {
      throw new Error("a schedule in which rank classes wait for each other");
    }
    walking = walking.filter((each) => !each.ended());
  }
  const blocking = mode === "off" || mode === "inline";
  return {
    start, end, ready,
    step_s: Math.max(...all.map((each) => each.now())),
    exposed_s: Math.min(...ofClass.map((rows) => exposedS(operations, rows, start, end, blocking))),
  };
}

/** A rank class: advance() goes on until it waits for another class or has done all, and says whether it moved. */
function classOf({operations, prices, mode, instants, place, awaitedS, send}, all, own) {
  const {start, end, ready, isReady, isEnded} = instants;
  const {overhead_s, loss_s, layers} = prices;
  const update_s = prices.update_s[own];
  const rows = [];
  const computed = [];
  for (const i of all) {
    if (QUEUED.has(operations[i].kind)) place[i] = rows.push(i) - 1;
    else computed.push(i);
  }
  const awaited = rows.map((k) => {
    if (operations[k].held) return Infinity;
    return operations[k].after.reduce((latest, i) => (place[i] < 0 ? Math.max(latest, i) : latest), -1);
  });
  const costs = rows.map((k) => collectiveCosts(operations[k], prices));
  const queue = queueOf(mode, rows, costs, awaited, operations, instants, prices);
  const {head, mayStart, flow, poll, drain, wait} = queue;

  let done = 0; // of the computations
  let now = 0;
  let host = 0; // when the host has launched all operations so far
  let ended = false;
  const runReady = () => {
    const before = now;
    while (mayStart()) now = drain(now, head.place);
    if (now > before) host = Math.max(host, now);
  };
  const compute = (work) => {
    now = mode === "thread" && mayStart() ? flow(now, work, true) : now + work;
  };

  const advance = () => {
    const before = done;
    for (; done < computed.length; done++) {
      const i = computed[done];
      const {kind, layer, after} = operations[i];
      const needed = after.reduce((latest, each) => Math.max(latest, place[each]), -1);
      if (needed >= head.place) {
        now = drain(now, needed);
        host = Math.max(host, now);
        if (mode === "poll") now = poll(now);
      }
      if (kind === "forward" || kind === "backward" || kind === "recompute") {
        const backward = kind === "backward";
        const times = layers[layer];
        host += backward ? times.launch_backward_s : times.launch_s;
        if (host > now) {
          if (mode === "thread" && mayStart()) flow(now, host - now, false);
          now = host;
        }
        start[i] = now;
        compute(backward ? times.gradient_ready_s : times.forward_s);
        if (backward) {
          ready[i] = now;
          isReady[i] = 1;
          if (mode === "inline") runReady();
          else if (mode === "poll" && times.announces) now = poll(now);
          compute(times.backward_s - times.gradient_ready_s);
        }
        if (mode === "poll") now = poll(now);
      } else if (kind === "synchronise" || kind === "receive") {
        now = host = Math.max(now, host);
        const [begin, cost] = awaitedS(i, now);
        if (begin === Infinity) return done > before;
        start[i] = now;
        now = wait(now, begin);
        if (mode === "thread") flow(now, cost, false);
        now = host = now + cost;
      } else {
        start[i] = now;
        const work = {"step overhead": overhead_s, update: update_s, loss: loss_s}[kind] ?? 0;
        now = mode === "thread" && work > 0 ? flow(now, work, true) : now + work;
        if (kind === "send") send(i, own, now);
        else if (kind !== "loss") host = Math.max(host, now); // the host launches backward beside the loss
      }
      end[i] = now;
      isReady[i] = isEnded[i] = 1;
      if (mode === "inline") runReady();
    }
    now = drain(now, rows.length - 1);
    ended = true;
    return true;
  };
  return {advance, ended: () => ended, now: () => now};
}

/** The time of a class's communication lane outside its compute lane; `blocking`: all of it interrupts computation. */
function exposedS(operations, rows, start, end, blocking) {
  const communicates = (i) => QUEUED.has(operations[i].kind) || WAITED_FOR.has(operations[i].kind);
  const sent = rows.filter(communicates);
  sent.sort((a, b) => start[a] - start[b]);
  const busy = [];
  let total = 0;
  let reach = -Infinity;
  for (const i of sent) {
    const low = Math.max(start[i], reach);
    reach = Math.max(end[i], low);
    busy.push([low, reach]);
    total += reach - low;
  }
  if (blocking) return Math.max(0, total);
  let hidden = 0;
  let first = 0;
  for (const i of rows) {
    if (communicates(i)) continue;
    while (first < busy.length && busy[first][1] <= start[i]) first++;
    for (let k = first; k < busy.length && busy[k][0] < end[i]; k++) {
      hidden += Math.max(0, Math.min(end[i], busy[k][1]) - Math.max(start[i], busy[k][0]));
    }
  }
  return Math.max(0, total - hidden);
}
