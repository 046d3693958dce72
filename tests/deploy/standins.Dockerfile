# What no registry gives us here, from Debian's packages, under the official images' names: it shows that compose.yaml works, and
# nothing of the official images.
ARG BASE
FROM ${BASE} AS nats
RUN apt-get update && apt-get install -y --no-install-recommends nats-server && rm -rf /var/lib/apt/lists/*
ENTRYPOINT ["nats-server"]

FROM ${BASE} AS prometheus
RUN apt-get update && apt-get install -y --no-install-recommends prometheus && rm -rf /var/lib/apt/lists/* \
    && mkdir -p /prometheus && chown 65534:65534 /prometheus
USER 65534:65534
ENTRYPOINT ["prometheus"]
