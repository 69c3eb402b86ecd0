"""From a Workload and a Plan to the Schedule of one step. One file a strategy; the fusion rules."""
