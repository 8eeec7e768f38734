"""The types of settings that are numbers: what a number may be on its own.

No number is infinite or not a number, no count is larger than a library can hold. `parse.py` makes
the error message of a value that its type refuses.
"""

from typing import Annotated

from pydantic import Field

LARGEST = 2**31 - 1  # Of what is counted: libraries keep such numbers in 32 bits.

NonNegativeInt = Annotated[int, Field(ge=0, le=LARGEST)]
PositiveInt = Annotated[int, Field(gt=0, le=LARGEST)]
Seed = Annotated[int, Field(ge=0, le=2**63 - 1)]
Port = Annotated[int, Field(ge=0, le=65535)]
MaxTokens = Annotated[int, Field(ge=2, le=LARGEST)]  # A token and the next one.
TopK = Annotated[int, Field(ge=-1, le=LARGEST)]  # -1 and 0: all tokens.
Size = Annotated[int, Field(gt=0, le=2**16)]  # Of a model that is made from nothing.
EvenSize = Annotated[int, Field(gt=0, le=2**16, multiple_of=2)]  # Rotary positions turn pairs.
Retries = Annotated[int, Field(ge=0, le=20)]  # The pause doubles with each.

Finite = Annotated[float, Field(allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]
PositiveShare = Annotated[float, Field(gt=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Epochs = Annotated[float, Field(gt=0, le=1e6)]
OptionalEpochs = Annotated[float, Field(ge=0, le=1e6)]  # 0: something else says how long.
# What timers of the operating system can hold; a limit of no time at all would end everything.
Seconds = Annotated[float, Field(ge=1e-3, le=1e7)]
Pause = Annotated[float, Field(ge=0, le=3600)]  # Seconds.
Minutes = Annotated[float, Field(ge=0.01, le=1e6)]
Gigabytes = Annotated[float, Field(ge=0, le=1e6)]
