"""Programs whose output is not read: how each is known, and what to do instead."""

from __future__ import annotations

import re
from typing import NamedTuple

from dpsim.errors import FileFormatError
from dpsim.imports.lines import Source

_MOST_LINES, _LONGEST = 2000, 200  # where a program's name is looked for
_BY_HAND = "into a machine file of your own (docs/predict.md, With figures of your own)"
_COLLECTIVE = (
    "run nccl-tests, osu_allreduce or IMB-MPI1 Allreduce there; or write its sizes and times as a table [[allreduce]] "
    + _BY_HAND
)
_LINK = (
    "it is a rate from one device or host to another and no time of a collective: give it as --line-rate with the log"
    " of a collective, or write its latency and bandwidth as [link] "
) + _BY_HAND
_STEP = "it is the speed of a training: give its steps to dpsim profile --from-steps or dpsim explain"


class Other(NamedTuple):
    """A program that is known by a pattern somewhere in its output, and what to do with what it measured."""

    name: str
    sign: re.Pattern[str]
    remedy: str = _COLLECTIVE

    def error(self, source: Source, line: int) -> FileFormatError:
        """Return the refusal of a file that this program wrote, known by a line."""
        return source.refuse(
            line,
            f"this is the output of {self.name}",
            allowed="the output of nccl-tests (text, or JSON of -J), OSU's osu_allreduce or IMB-MPI1 Allreduce",
            remedy=self.remedy,
        )


def _other(name: str, sign: str, remedy: str = _COLLECTIVE) -> Other:
    return Other(name, re.compile(sign), remedy)


MSCCLPP = _other(
    "MSCCL++'s own test, whose in-place columns come first",
    r"MSCCL\+\+|mscclpp|\bin-place\s+out-of-place|^#?\s*size\s+count\s+time\s+algbw\s+busbw|NCCL AlgBW",
)
OTHERS = (
    MSCCLPP,
    _other("Neuron's nccom-test", r"nccom-test|size\(B\)\s+count\(elems\)\s+type|\bnccom\b"),
    _other(
        "oneCCL's benchmark",
        r"oneCCL|\bCCL_[A-Z]+|ccl benchmark|Benchmarking: |elem_count=|elem_counts|\bccl::|buf_count\s*[:=]"
        r"|\bbackend\s*[:=]\s*(?:host|sycl|ccl)\b",
    ),
    _other(
        "DeepSpeed's ds_bench", r"Performance of \w+ on \d+ devices|ds_bench|deepspeed|Size \(Bytes\)\s+Description"
    ),
    _other(
        "UCC (ucc_perftest, or a trace of HPC-X)",
        r"ucc_perftest|Collective:\s+\w+|\bUCC +(?:INFO|DEBUG|TRACE|DIAG|WARN)|ucc_coll|UCC_|TL_\w+"
        r"|\bhcoll\b|HCOLL|SHARP_COLL",
    ),
    _other(
        "perftest (ib_write_bw and its kin)",
        r"\bib_\w+_(?:bw|lat)\b|RDMA_\w+ (?:BW|Latency|Bidirectional)|(?:Send|Write|Read|Atomic) (?:BW|Latency) Test"
        r"|BW peak\[|BW average\[|MsgRate\[|t_typical\[usec\]|raw_ethernet",
        _LINK,
    ),
    _other("iperf", r"\biperf3?\b|\[ *ID\]\s+Interval|Connecting to host .* port \d+|(?:sender|receiver)$", _LINK),
    _other("netperf", r"MIGRATED (?:TCP|UDP)|netperf|Throughput\s+10\^6bits/sec", _LINK),
    _other("qperf or sockperf", r"\bqperf\b|sockperf|^\w+_(?:bw|lat):$", _LINK),
    _other("fabtests (fi_pingpong and its kin)", r"\bfi_\w+|usec/xfer|Mxfers/sec", _LINK),
    _other("ucx_perftest", r"ucx_perftest|overhead \(usec\)|typical average overall|\bUCT_|Stage:.*50\.0%ile", _LINK),
    _other("NetPIPE", r"NetPIPE|NPmpi|Mbps in\s+[0-9.]+ usec", _LINK),
    _other(
        "CUDA's bandwidth tests (p2pBandwidthLatencyTest, nvbandwidth)",
        r"P2P (?:Connectivity|=\w+)|P2P Bandwidth|p2pBandwidthLatencyTest|nvbandwidth|bandwidthTest|Bandwidth Matrix"
        r"|memcpy CE|TransferBench|rocm.bandwidth",
        _LINK,
    ),
    _other("nvidia-smi", r"NVIDIA-SMI|GPU0\s+GPU1|CPU Affinity", _LINK),
    _other("Habana's hcl_demo", r"hcl_demo|NW Bandwidth"),
    _other(
        "Gloo's benchmark", r"Algorithm:\s+\w*(?:allreduce|allgather|reduce|broadcast|barrier)\w*|p50 \(us\)|\bgloo\b"
    ),
    _other("mpiBench", r"mpiBench|Bytes:\s*[0-9.]+\s+Iters:|\bAllreduce\s+Bytes:"),
    _other("ReproMPI", r"reprompi|ReproMPI|loop_runtime_sec|runtime_sec"),
    _other("SKaMPI", r"SKaMPI|skampi|begin result"),
    _other("NVSHMEM's perftest", r"nvshmem|NVSHMEM|size \(B\).*latency \(us\)|size\(B\)\s*\|"),
    _other("PARAM (PyTorch's comms benchmark)", r"COMMS-RES|\bparam_?bench|commsParams|total-size \(B\)"),
    _other("NCCL's profiler or debug output alone", r"\[[0-9]+\] NCCL (?:INFO|TRACE)"),
    _other(
        "a benchmark written with PyTorch",
        r"tput_avg|busbw_avg|payload.*busbw|average bandwidth of all_reduce|torch\.distributed|\bdist\.all_reduce"
        r"|ProcessGroup"
        r"|\b(?:all_?reduce|all_?gather|reduce_?scatter)\b.*\b(?:[GM]B/s|[GM]i?B|ms|Gbps|GBps)\b"
        r"|\b(?:algo?bw|busbw)\b.*\b(?:Gbps|GBps|[GM]B/s)\b",
    ),
    _other(
        "Horovod's benchmark or a training's log", r"(?:Img|img|images|samples|tokens)(?:/|\s*per\s*)s(?:ec)?\b", _STEP
    ),
)
_KEYS = _other(
    "a program that prints key=value lines, as oneCCL's benchmark does", r"(?:\b\w+=[^\s,;]+[\s,;]+){2}\w+=\S+"
)
_ROWS_OF_MSCCLPP = _other(MSCCLPP.name, r"^[0-9]+\s+[0-9]+(?:(?:\s+[0-9.e+]+){3}\s+[0-9]+){2}$")
_TABLE = Other(
    "a table made by hand or another program's, not a benchmark's own text",
    re.compile(
        r"(?i)\b(?:nodes?|gpus?|ranks?|np|nproc|size|bytes|msg)\b.*(?:Gbit/?s|Gb/s|Gbps|Mbit/s|Mbps|[GM]i?B/s|\bus\b|\(us\)"
        r"|\bms\b|usec|latency|time|bandwidth|busbw|algbw)|^[0-9.]+ ?[KMG]?(?:i?B)?(?:[\s,;|]+[0-9.]+)+$"
    ),
)


def refusal(source: Source) -> FileFormatError | None:
    """Return the refusal that names the program which wrote a file; ``None`` if it is none that is known."""
    texts = [text[:_LONGEST] for text in source.texts()[:_MOST_LINES]]
    for other in (*OTHERS, _KEYS, _ROWS_OF_MSCCLPP, _TABLE):
        line = next((line for line, text in enumerate(texts, 1) if other.sign.search(text)), None)
        if line is not None:
            return other.error(source, line)
    return None
