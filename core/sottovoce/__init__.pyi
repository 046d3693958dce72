# What type checkers and editors see of the door: a stub, for the names of the client may be imported here, and not by the core.

from sottovoce.auditing.audit import Audit as Audit
from sottovoce.data.joining import LabelJoin as LabelJoin
from sottovoce.door import Simulation as Simulation
from sottovoce.door import audit as audit
from sottovoce.door import calibrate as calibrate
from sottovoce.door import simulate as simulate
from sottovoce.errors import DataError as DataError
from sottovoce.errors import SottovoceError as SottovoceError
from sottovoce.errors import SpecError as SpecError
from sottovoce.experiment import Experiment as Experiment
from sottovoce.experiment import load as load
from sottovoce.privacy.guarantee import Guarantee as Guarantee
from sottovoce.table import Table as Table
from sottovoce_client.deployment import connect as connect
from sottovoce_client.live.connecting import connect_learner as connect_learner
from sottovoce_client.live.prequential import Prequential as Prequential
from sottovoce_client.running.compare import compare as compare
from sottovoce_client.running.sweep import sweep as sweep

__all__: tuple[str, ...]
__version__: str
