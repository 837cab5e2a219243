"""From losses to an update: one file per estimator, and the table of them. (Defaults: ../defaults.py.)

base.py    the interface of an estimator             mezo.py     antithetic pairs
fzoo.py    one-sided directions, scaled by spread    grzo.py     a direction per group of rows
meazo.py   pairs, scaled by a second moment
"""

from keyhole.methods.zo.estimators.base import Estimator
from keyhole.methods.zo.estimators.fzoo import FZOO
from keyhole.methods.zo.estimators.grzo import GRZO
from keyhole.methods.zo.estimators.meazo import MEAZO
from keyhole.methods.zo.estimators.mezo import MeZO

ESTIMATORS: dict[str, type[Estimator]] = {each.name: each for each in (MeZO, FZOO, GRZO, MEAZO)}
