"""Products of matrices that are rounded to bfloat16 in the memory of a device: our kernel rounds, cuBLAS multiplies."""

from __future__ import annotations

import numpy as np

from dpsim.comm.cuda.device import Device, DeviceArray, Stream
from dpsim.comm.cuda.gemm import Coded, gemm
from dpsim.kernels.allreduce.cuda.arguments import address_of
from dpsim.kernels.bfloat16_cuda import encoding


class DeviceProducts:
    """See ``dpsim.memory.CodedProducts``; in one stream. Codes begin at a multiple of 256 bytes."""

    def __init__(self, device: Device, stream: Stream) -> None:
        self._device, self._stream = device, stream
        self._codes: dict[str, DeviceArray] = {}

    @property
    def size_bytes(self) -> int:
        return sum(int(codes.nbytes) for codes in self._codes.values())

    def encode(self, place: str, matrix: DeviceArray) -> Coded:
        transposed = not matrix.flags.c_contiguous and matrix.flags.f_contiguous
        numbers = (matrix.T if transposed else matrix).reshape(-1)
        size = len(numbers)
        codes = self._codes.get(place)
        if codes is None or len(codes) < size:
            codes = self._codes[place] = self._device.memory(2 * size).view(np.uint16)
        codes = codes[:size]
        if size:
            encoding(address_of(numbers), address_of(codes), size)(self._stream.launch)
        rows, columns = matrix.shape
        return Coded(codes=codes, rows=rows, columns=columns, transposed=transposed)

    def multiply(self, left: Coded, right: Coded, out: DeviceArray) -> None:
        if left.columns == 0:
            out[...] = 0
        elif out.size:
            self._device.multiply(gemm(left, right), right.codes, left.codes, out)
