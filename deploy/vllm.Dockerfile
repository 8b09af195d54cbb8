# vLLM with Meshfill's connector, for deploy/kubernetes/components/vllm:
#
#   docker build -f deploy/vllm.Dockerfile -t meshfill-vllm:0.1.0 .
#
# VLLM names vLLM's image, of a version that docs/vllm.md says is tested. Pin it by its digest in a release build.
ARG VLLM=vllm/vllm-openai:v0.32.0
FROM ${VLLM}
COPY proto /src/proto
COPY python /src/python
RUN python3 -m pip install --no-cache-dir '/src/python[vllm]' && rm -rf /src
