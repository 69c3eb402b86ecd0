// The walk over a schedule, as dpsim/predict/simulate.py and queue.py: when each operation starts and ends, where one
// lane computes and the other one communicates.
//
// - off: collectives run only while something waits for them.
// - inline: they run on the computing thread as soon as they may start, and computation stops meanwhile.
// - thread: a fluid. Beside computation a collective progresses at 1 / overlapped and takes some computation away.
// - poll: a collective is so many stages; the end of a stage is noticed, and the next one started, at polls alone.

/**
 * {start, end, ready, step_s, exposed_s}: instants of every operation in seconds. `ready` is when the gradients of a
 * backward are final. `prices` are those of prices.js.
 */
function walk(operations, prices, mode) {
  const count = operations.length;
  const start = new Float64Array(count);
  const end = new Float64Array(count);
  const ready = new Float64Array(count);
  const isReady = new Uint8Array(count);
  const isEnded = new Uint8Array(count);
  const rows = [];
  const place = new Int32Array(count).fill(-1); // in the queue of collectives; -1: on the compute lane
  operations.forEach((operation, i) => {
    if (QUEUED.has(operation.kind)) place[i] = rows.push(i) - 1;
  });
  const awaited = rows.map((k) => Math.max(-1, ...operations[k].after.filter((i) => place[i] < 0)));
  const costs = rows.map((k) => collectiveCosts(operations[k], prices));
  const {stages, poll_s, overhead_s, loss_s, update_s, layers} = prices;
  // The first collective that has not ended: its place, the part (or under poll the stages) left; -1 or 0: not started.
  const idleLeft = mode === "poll" ? 0 : -1;
  const head = {place: 0, left: idleLeft, stageEnd: 0};

  const mayStart = () => {
    if (head.place >= rows.length) return false;
    const k = rows[head.place];
    if (operations[k].held) return false;
    const latest = awaited[head.place];
    return latest < 0 || Boolean(operations[k].kind === "all-gather" ? isEnded[latest] : isReady[latest]);
  };
  const next = (now) => {
    end[rows[head.place]] = now;
    head.place += 1;
    head.left = idleLeft;
  };

  /** Advance both lanes until `work` seconds of computation, or of standing still, are done. */
  const flow = (now, work, computing) => {
    while (mayStart()) {
      if (head.left < 0) {
        head.left = 1;
        start[rows[head.place]] = now;
      }
      const cost = costs[head.place];
      const length = computing ? cost.overlapped_s : cost.idle_s;
      const left = head.left * length;
      const speed = computing && length > 0 ? Math.max(0, 1 - cost.loss_s / length) : 1;
      if (speed * left > work || (work <= 0 && left > 0)) {
        const spent = work > 0 ? work / speed : 0;
        head.left -= spent / length;
        return now + spent;
      }
      now += left;
      work = Math.max(0, work - speed * left);
      next(now);
    }
    return now + work;
  };

  /** Under poll, look at the communication once: notice a stage that has ended, start what may start. */
  const poll = (now) => {
    if (head.left > 0) now += poll_s;
    while (mayStart()) {
      const cost = costs[head.place];
      const stageS = cost.idle_s / stages;
      if (head.left <= 0) {
        start[rows[head.place]] = now;
        head.left = stages;
        head.stageEnd = now + stageS;
        now += cost.loss_s;
      } else if (head.stageEnd > now) return now;
      else if (head.left > 1) {
        head.left -= 1;
        head.stageEnd = now + stageS;
      } else next(now);
    }
    return now;
  };

  /** Stand still until the collective at a place of the queue has ended. */
  const drain = (now, last) => {
    while (head.place <= last) {
      const {idle_s} = costs[head.place];
      const began = mode === "poll" ? head.left > 0 : head.left >= 0;
      if (!began) start[rows[head.place]] = now;
      if (mode === "poll") {
        const stageS = idle_s / stages;
        const stageEnd = began ? Math.max(now, head.stageEnd) : now + stageS;
        now = stageEnd + ((began ? head.left : stages) - 1) * stageS;
      } else now += (began ? head.left : 1) * idle_s;
      next(now);
    }
    return now;
  };

  let now = 0;
  let host = 0; // when the host has launched all operations so far
  const runReady = () => {
    const before = now;
    while (mayStart()) now = drain(now, head.place);
    if (now > before) host = Math.max(host, now);
  };
  const compute = (work) => {
    now = mode === "thread" && mayStart() ? flow(now, work, true) : now + work;
  };

  operations.forEach((operation, i) => {
    if (place[i] >= 0) return;
    const {kind, layer, after} = operation;
    const needed = Math.max(-1, ...after.map((each) => place[each]));
    if (needed >= head.place) {
      now = drain(now, needed);
      host = Math.max(host, now);
      if (mode === "poll") now = poll(now);
    }
    if (kind === "forward" || kind === "backward") {
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
    } else if (kind === "synchronise") {
      now = host = Math.max(now, host);
      start[i] = now;
      const cost = at(prices.sums, 0, operation.size_bytes);
      if (mode === "thread") flow(now, cost, false);
      now = host = now + cost;
    } else {
      start[i] = now;
      const work = {"step overhead": overhead_s, update: update_s, loss: loss_s}[kind];
      now = mode === "thread" && work > 0 ? flow(now, work, true) : now + work;
      if (kind !== "loss") host = Math.max(host, now); // the host launches backward beside the loss
    }
    end[i] = now;
    isReady[i] = isEnded[i] = 1;
    if (mode === "inline") runReady();
  });
  now = drain(now, rows.length - 1);
  const blocking = mode === "off" || mode === "inline";
  return {start, end, ready, step_s: now, exposed_s: exposedS(operations, start, end, blocking)};
}

/** Seconds of a collective of a bucket alone, beside computation, and of the computation lost then. */
function collectiveCosts({kind, size_bytes}, prices) {
  const gathers = kind === "all-gather";
  const [idle, overlapped] = gathers ? [prices.gather, prices.overlapped_gather] : [prices.idle, prices.overlapped];
  const beside = overlapped.rows.length > 1;
  return {
    idle_s: at(idle, 0, size_bytes),
    overlapped_s: beside ? at(overlapped, 0, size_bytes) : 0,
    loss_s: beside ? at(overlapped, 1, size_bytes) : 0,
  };
}

/** The time of the communication lane outside the compute lane; `blocking`: all of it interrupts computation. */
function exposedS(operations, start, end, blocking) {
  const communicates = ({kind}) => QUEUED.has(kind) || kind === "synchronise";
  const sent = range(0, operations.length).filter((i) => communicates(operations[i]));
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
  operations.forEach((operation, i) => {
    if (communicates(operation)) return;
    while (first < busy.length && busy[first][1] <= start[i]) first++;
    for (let k = first; k < busy.length && busy[k][0] < end[i]; k++) {
      hidden += Math.max(0, Math.min(end[i], busy[k][1]) - Math.max(start[i], busy[k][0]));
    }
  });
  return Math.max(0, total - hidden);
}
