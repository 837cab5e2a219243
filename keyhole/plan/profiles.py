"""Common machines by name: estimates from data sheets, for `keyhole plan --machine NAME`.

A GPU is described by the rate of its matrix products with many rows, and by its memory bandwidth; with few rows a
product also waits for its weights, which are read once:

    rate(rows) = best / (1 + best b / (2 memory rows))        b = 2 bytes per weight

Products are estimated at 75 to 90 % of the data sheet's dense 16-bit rate with fp32 sums (on GeForce half of the
advertised rate), memory at 85 %, a link at 85 % of its nominal rate. The numbers of `h200` are those of the runs in
benchmarks/records/ (16 cores of a Xeon). All of them are estimates: another board, cooler or CPU gives other rates.
"""

from keyhole.errors import UserError
from keyhole.machine.rates import WORKSPACE_BYTES, WORKSPACE_BYTES_9, Rates
from keyhole.machine.sizes import GIB

ROWS = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 32768)
FP32_SHARE = {"laptop": 0.4, "3060": 0.5, "4080": 0.45, "4090": 0.45, "a10": 0.4}
FP32_SHARE |= {"a100": 0.07, "h100": 0.07, "h200": 0.07}


def _machine(
    name: str,
    title: str,
    *,
    gpu: int,
    ram: int,
    tflops: float,
    memory: float,
    link: float,
    host: float,
    adam: float,
    hopper: bool = False,
) -> Rates:
    """gpu, ram in GiB; tflops of 16-bit products; memory, link and host memory in GB/s; adam in G parameters/s."""
    best, bandwidth = tflops * 1e12, memory * 1e9
    return Rates(
        name=title,
        measured=False,
        gpu_bytes=gpu * GIB,
        host_bytes=ram * GIB,
        products={rows: best / (1 + best / (bandwidth * rows)) for rows in ROWS},
        products_fp32=best * FP32_SHARE[name],
        device_memory=bandwidth,
        up=link * 1e9,
        down=link * 1e9,
        both=0.87 * link * 1e9,
        host_memory=host * 1e9,
        adam=adam * 1e9,
        workspace_bytes=WORKSPACE_BYTES_9 if hopper else WORKSPACE_BYTES,
    )


def _all() -> dict[str, Rates]:
    small = {"host": 38.0, "adam": 1.2}
    machines = {
        "laptop": {"title": "laptop, RTX 4060 8 GB, PCIe 4 x8", "gpu": 8, "ram": 32, "tflops": 26.0, "memory": 220.0}
        | {"link": 12.5, **small},
        "3060": {"title": "RTX 3060 12 GB, PCIe 4 x16", "gpu": 12, "ram": 32, "tflops": 22.0, "memory": 310.0}
        | {"link": 25.0, **small},
        "4080": {"title": "RTX 4080 16 GB, PCIe 4 x16", "gpu": 16, "ram": 64, "tflops": 80.0, "memory": 610.0}
        | {"link": 25.0, "host": 60.0, "adam": 2.0},
        "4090": {"title": "RTX 4090 24 GB, PCIe 4 x16", "gpu": 24, "ram": 64, "tflops": 145.0, "memory": 860.0}
        | {"link": 25.0, "host": 60.0, "adam": 2.0},
        "a10": {"title": "A10 24 GB, PCIe 4 x16", "gpu": 24, "ram": 128, "tflops": 70.0, "memory": 510.0}
        | {"link": 25.0, "host": 85.0, "adam": 2.5},
        "a100": {"title": "A100 80 GB, PCIe 4 x16", "gpu": 80, "ram": 256, "tflops": 250.0, "memory": 1700.0}
        | {"link": 25.0, "host": 120.0, "adam": 3.5},
        "h100": {"title": "H100 80 GB, PCIe 5 x16", "gpu": 80, "ram": 256, "tflops": 640.0, "memory": 2850.0}
        | {"link": 55.0, "host": 150.0, "adam": 4.0, "hopper": True},
        "h200": {"title": "H200 141 GB, PCIe 5 x16", "gpu": 140, "ram": 128, "tflops": 740.0, "memory": 4000.0}
        | {"link": 55.0, "host": 85.0, "adam": 3.1, "hopper": True},
    }
    return {name: _machine(name, **about) for name, about in machines.items()}  # type: ignore[arg-type]


PROFILES: dict[str, Rates] = _all()


def profile(name: str) -> Rates:
    """The machine of this name; UserError lists the known names."""
    if name.lower() not in PROFILES:
        raise UserError(f"--machine: {name!r} is not one of {', '.join(PROFILES)}, or here")
    return PROFILES[name.lower()]


def profile_of(gpu: str) -> Rates | None:
    """The estimate for a GPU, by its CUDA name; None if there is none."""
    words = gpu.lower().replace("-", " ").split()
    return next((rates for name, rates in PROFILES.items() if name in words), None)
