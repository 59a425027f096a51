# The image of all five services; `command` in compose.yaml says which one a container runs. Not built yet where rowmill is made: no engine.
FROM python:3.11-slim-bookworm
WORKDIR /opt/rowmill
COPY requirements.lock ./
RUN pip install --no-cache-dir --require-hashes -r requirements.lock
COPY pyproject.toml README.md LICENSE ./
COPY contracts contracts
COPY shared shared
COPY services services
RUN pip install --no-cache-dir --no-deps --no-build-isolation .
RUN useradd --system --no-create-home rowmill
USER rowmill
ENTRYPOINT ["rowmill"]
