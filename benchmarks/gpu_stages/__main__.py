"""`python -m benchmarks.gpu_stages`."""

from benchmarks.gpu_stages import runner

runner.main()
