"""/v1/models and /v1/presets: what a job may start from."""

from __future__ import annotations

import sqlalchemy as sa
from fastapi import APIRouter
from starlette.responses import Response

from api.auth import requires
from api.catalogue import BUILTIN, BaseModel, local_models
from api.deps import Services, ServicesDep
from api.present import answer
from grpo_engine.contract.error import NotFound
from grpo_engine.contract.presets import PRESETS, PresetCard
from grpo_engine.contract.view import Model, Page
from jobs.ledger.records import CheckpointRecord
from jobs.ledger.rows import checkpoint_record
from jobs.tables import checkpoints, promotions

router = APIRouter(prefix="/v1", tags=["models"])

_MAX_TUNED = 1000
"""Checkpoints listed as models: the promoted ones, then the newest."""


@router.get("/models", response_model=Page[Model])
@requires("read")
def list_models(services: ServicesDep) -> Response:
    """Base models this server can name without the Hub, and every published checkpoint, the promoted ones with their date."""
    return answer(Page[Model](data=_models(services)))


@router.get("/models/{model:path}", response_model=Model)
@requires("read")
def get_model(model: str, services: ServicesDep) -> Response:
    """One of them."""
    for found in _models(services):
        if found.id == model:
            return answer(found)
    raise NotFound(f"there is no model {model[:200]!r}; GET /v1/models lists them", param="model")


@router.get("/presets", response_model=Page[PresetCard])
@requires("read")
def list_presets() -> Response:
    """Named defaults with their sources; `config` holds for every size, `sizes` what a size changes."""
    return answer(Page[PresetCard](data=PRESETS))


def _published(services: Services) -> list[CheckpointRecord]:
    table = checkpoints.c
    there = sa.and_(table.kind == "published", table.superseded.is_(False), table.damaged.is_(False), table.deleted_at.is_(None))
    is_promoted = promotions.c.checkpoint_id.is_not(None)
    both = checkpoints.outerjoin(promotions, promotions.c.checkpoint_id == table.id)
    order = (is_promoted.desc(), table.created_at.desc(), table.id)
    query = sa.select(checkpoints).select_from(both).where(there).order_by(*order).limit(_MAX_TUNED)
    with services.ledger.database.read() as connection:
        return [checkpoint_record(row) for row in connection.execute(query)]


def _models(services: Services) -> list[Model]:
    bases = [BaseModel(BUILTIN, "builtin", None), *local_models(services.settings.model_dir)]
    found = [
        Model(id=base.name, created=base.created, owned_by="library" if base.kind == "builtin" else "local", kind=base.kind)
        for base in bases
        if base.kind != "hub"
    ]
    tuned = _published(services)
    promoted = services.ledger.promotions_of([record.id for record in tuned])
    for record in tuned:
        passed = promoted.get(record.id)
        at = None if passed is None else int(passed.promoted_at)
        found.append(Model(id=record.id, created=int(record.created_at), owned_by=record.job_id, kind="checkpoint", promoted_at=at))
    return found
