# Tokenlane and its simulated engines in one image: small, without compiler, not root.
FROM python:3.11-slim AS build
WORKDIR /build
RUN python -m venv /opt/tokenlane
COPY requirements/runtime.txt ./
RUN /opt/tokenlane/bin/pip install --no-cache-dir --require-hashes --requirement runtime.txt
COPY pyproject.toml README.md LICENSE CHANGELOG.md ./
COPY extproc ./extproc
RUN python -m venv /opt/wheel \
    && /opt/wheel/bin/pip wheel --no-cache-dir --no-deps --wheel-dir /build/dist . \
    && /opt/tokenlane/bin/pip install --no-cache-dir --no-deps /build/dist/*.whl

FROM python:3.11-slim
COPY --from=build /opt/tokenlane /opt/tokenlane
ENV PATH=/opt/tokenlane/bin:$PATH PYTHONUNBUFFERED=1
# The journal's place; mount storage here that outlives the container.
RUN useradd --system --uid 65532 --no-create-home tokenlane && install -d -o tokenlane /var/lib/tokenlane
USER 65532
VOLUME /var/lib/tokenlane
EXPOSE 9002 9003
ENTRYPOINT ["tokenlane"]
CMD ["serve", "/etc/tokenlane/policy.yaml", "--listen", "0.0.0.0:9002", "--journal", "/var/lib/tokenlane/journal"]
