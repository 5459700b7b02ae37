# tfdist with every extra but gpu, ray and dev, and the configs of tfdist.train. To train on a GPU, add
# tensorflow[and-cuda] to the image. A program of your own: FROM this image, COPY it into /work.
FROM python:3.11-slim AS build
WORKDIR /source
COPY . ./
RUN python -m venv /opt/tfdist \
    && /opt/tfdist/bin/pip install --no-cache-dir '.[all]' -c constraints.txt

FROM python:3.11-slim
COPY --from=build /opt/tfdist /opt/tfdist
COPY configs /work/configs
ENV PATH=/opt/tfdist/bin:$PATH
WORKDIR /work
RUN chown 1000:1000 /work
USER 1000:1000
ENTRYPOINT ["tfdist"]
CMD ["--help"]
