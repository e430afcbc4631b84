FROM python:3.11-slim-bookworm
RUN apt-get update -qq && apt-get install -y -qq --no-install-recommends prometheus \
    && install -d -o nobody /prometheus
USER nobody
