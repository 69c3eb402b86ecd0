// The communication lane of a rank class, as dpsim/model/queue.py: how its collectives go on, one after another.

/**
 * `rows` are a class's collectives of buckets, `costs` of each the seconds alone, beside computation, and lost then.
 * `awaited` is the last computation that each one waits for (-1: none, Infinity: it starts only when waited for).
 */
function queueOf(mode, rows, costs, awaited, operations, {start, end, isReady, isEnded}, {stages, poll_s}) {
  // The first collective that has not ended: its place, the part (or under poll the stages) left; -1 or 0: not started.
  const idleLeft = mode === "poll" ? 0 : -1;
  const head = {place: 0, left: idleLeft, stageEnd: 0};

  const mayStart = () => {
    if (head.place >= rows.length) return false;
    const latest = awaited[head.place];
    if (latest < 0) return true;
    return Boolean((operations[rows[head.place]].kind === "all-gather" ? isEnded : isReady)[latest]);
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

  /** Under poll, let stages follow one another until an instant, or the end of a place of the queue. */
  const follow = (now, until, last) => {
    while (head.place <= last) {
      if (head.left <= 0 && until < Infinity && !mayStart()) return until;
      const stageS = costs[head.place].idle_s / stages;
      if (head.left <= 0) {
        start[rows[head.place]] = now;
        head.left = stages;
        head.stageEnd = now + stageS;
      }
      now = Math.max(now, head.stageEnd);
      const end = now + (head.left - 1) * stageS;
      if (end > until) {
        if (now <= until) {
          const noticed = Math.min(1 + Math.floor((until - now) / stageS), head.left - 1);
          head.left -= noticed;
          head.stageEnd = now + noticed * stageS;
        }
        return until;
      }
      now = end;
      next(now);
    }
    return now;
  };

  /** Stand still until the collective at a place of the queue has ended. */
  const drain = (now, last) => {
    if (mode === "poll") return follow(now, Infinity, last);
    while (head.place <= last) {
      if (head.left < 0) {
        head.left = 1;
        start[rows[head.place]] = now;
      }
      now += head.left * costs[head.place].idle_s;
      next(now);
    }
    return now;
  };

  /** Stand still until an instant, while the queue goes on. */
  const wait = (now, until) => {
    if (mode === "thread" && until > now) flow(now, until - now, false);
    else if (mode === "poll" && until > now) follow(now, until, rows.length - 1);
    return Math.max(now, until);
  };
  return {head, mayStart, flow, poll, drain, wait};
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
