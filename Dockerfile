# The sidecar as one static binary in an otherwise empty image.
#
#   make image
#
# It listens on loopback until told otherwise: containers of one pod reach it
# as it is. To be reached from other pods it needs --host, API keys and a gossip
# key, and refuses to start without them.

ARG GO_VERSION=1.26
FROM --platform=$BUILDPLATFORM golang:${GO_VERSION} AS build
WORKDIR /src
COPY go.mod go.sum ./
RUN --mount=type=cache,target=/go/pkg/mod go mod download
COPY . .
ARG VERSION=dev
ARG TARGETOS
ARG TARGETARCH
# The flags of `make build`.
RUN --mount=type=cache,target=/go/pkg/mod \
    --mount=type=cache,target=/root/.cache/go-build \
    CGO_ENABLED=0 GOOS=${TARGETOS} GOARCH=${TARGETARCH} GOFLAGS='-trimpath -buildvcs=false' \
    go build -ldflags "-s -w -X main.version=${VERSION}" -o /out/membrane ./cmd/membrane
# The folder of the engine socket: an empty image has nothing to make it with.
RUN mkdir -p /out/run/membrane && chmod 0750 /out/run/membrane

FROM scratch
ARG VERSION=dev
LABEL org.opencontainers.image.title="membrane" \
      org.opencontainers.image.description="A KV-cache sidecar for LLM inference" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}"
COPY --from=build /out/membrane /membrane
COPY --from=build --chown=65532:65532 /out/run /run
COPY --from=build /src/LICENSE /LICENSE
USER 65532:65532
# HTTP, data between sidecars, gossip.
EXPOSE 8080 8081 7946/tcp 7946/udp
ENTRYPOINT ["/membrane"]
CMD ["serve"]
