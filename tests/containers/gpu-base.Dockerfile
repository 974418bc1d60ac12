# An image of the kind that the target `gpu` of compose/Dockerfile is given: the distribution's Python, with pip and PyTorch.
# PYTHON is the target `python` of that file, whose environment has PyTorch.
ARG PYTHON
FROM ${PYTHON}
RUN apt-get update -qq \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends python3-pip >/dev/null \
    && rm -rf /var/lib/apt/lists/* \
    && ls -d /opt/ronde/lib/python3*/site-packages >/usr/lib/python3/dist-packages/pytorch.pth
