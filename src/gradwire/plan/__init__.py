"""What a step would take with each method: a cost model, what feeds it, and a verdict."""

from gradwire.plan.choose import Verdict, choose, pays_below
from gradwire.plan.model import Cost, Network, Prediction, Work, predict

__all__ = ["Cost", "Network", "Prediction", "Verdict", "Work", "choose", "pays_below", "predict"]
