"""All screens, in key order."""

from __future__ import annotations

from console.screens.alerts import AlertsView
from console.screens.base import View
from console.screens.batches import BatchesView
from console.screens.finished import FinishedView
from console.screens.gpus import GpusView
from console.screens.keys import KeysView
from console.screens.kv import KvView
from console.screens.models import ModelsView
from console.screens.overview import OverviewView
from console.screens.requests import RequestsView
from console.screens.rows import AuditView, LogsView
from console.screens.silences import SilencesView
from console.screens.tenants import TenantsView
from console.screens.usage import UsageView


def all_views() -> list[View]:
    """Create a view for each screen."""
    return [
        OverviewView(),
        BatchesView(),
        KvView(),
        RequestsView(),
        GpusView(),
        ModelsView(),
        TenantsView(),
        AlertsView(),
        AuditView(),
        LogsView(),
    ]


def alternate_views() -> list[View]:
    """Create a view for each screen that shares another screen's key (`View.alternate`)."""
    return [FinishedView(), UsageView(), KeysView(), SilencesView()]
