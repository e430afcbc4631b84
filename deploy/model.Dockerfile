# An artifact as an image, for image volumes and init containers of Kubernetes: make model-image
FROM busybox:1.37.0-musl AS copy

FROM scratch
# The static cp of an init container.
COPY --from=copy /bin/busybox /bin/cp
COPY . /model
