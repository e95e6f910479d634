"""One error family. Status and code sit on the class; one handler renders them."""

from __future__ import annotations

import re


class GrpoError(Exception):
    """An error meant for a person: says what is wrong, where, and what to do."""

    status = 500
    code = "internal_error"
    type = "server_error"

    def __init__(self, message: str, *, param: str | None = None, headers: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        """JSON path of the field, for example `method.grpo.beta.value`."""
        self.headers = headers or {}

    def rename(self, written: str) -> None:
        """The client spells the field otherwise. A longer path that only ends in its name is another field, and stays."""
        if self.param is not None and self.param != written:
            self.message = re.sub(rf"(?<![\w.]){re.escape(self.param)}", lambda _: written, self.message)
            self.args, self.param = (self.message,), written


class InvalidRequest(GrpoError):
    """The request cannot be understood or breaks a rule."""

    status = 422
    code = "invalid_request"
    type = "invalid_request_error"


class NotImplementedYet(InvalidRequest):
    """A documented setting this build does not carry out."""

    code = "not_implemented"


class UnsupportedMethod(InvalidRequest):
    """A training method other than GRPO."""

    code = "unsupported_method"


class MalformedJson(InvalidRequest):
    """The body is not strict JSON."""

    status = 400
    code = "malformed_json"


class PayloadTooLarge(InvalidRequest):
    """The body exceeds its cap."""

    status = 413
    code = "payload_too_large"


class UnsupportedMediaType(InvalidRequest):
    """The body has the wrong content type."""

    status = 415
    code = "unsupported_media_type"


class Unauthorized(GrpoError):
    """No valid key."""

    status = 401
    code = "invalid_api_key"
    type = "authentication_error"


class Forbidden(GrpoError):
    """The key's scope does not allow this."""

    status = 403
    code = "forbidden"
    type = "permission_error"


class NotFound(GrpoError):
    """No such thing."""

    status = 404
    code = "not_found"
    type = "invalid_request_error"


class Conflict(GrpoError):
    """The state of the resource forbids it; retrying will not help."""

    status = 409
    code = "conflict"
    type = "invalid_request_error"

    def __init__(self, message: str, *, param: str | None = None, headers: dict[str, str] | None = None) -> None:
        super().__init__(message, param=param, headers={"x-should-retry": "false", **(headers or {})})


class ReferenceNotLoaded(Conflict):
    """Beta above 0 on a job that holds no reference."""

    code = "reference_not_loaded"


class IdempotencyMismatch(InvalidRequest):
    """The same Idempotency-Key came with another body."""

    code = "idempotency_key_reused"


class PreconditionFailed(GrpoError):
    """If-Match does not match."""

    status = 412
    code = "precondition_failed"
    type = "invalid_request_error"


class RateLimited(GrpoError):
    """Too many requests."""

    status = 429
    code = "rate_limit_exceeded"
    type = "rate_limit_error"


class Unavailable(GrpoError):
    """A part the server needs does not answer; try again."""

    status = 503
    code = "unavailable"


class InsufficientStorage(GrpoError):
    """The disk is full."""

    status = 507
    code = "insufficient_storage"
