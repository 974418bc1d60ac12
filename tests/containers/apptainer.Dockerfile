# What compose/apptainer/ronde.def makes, as far as an engine for containers can: its `%files` and its `%post`. PYTHON and WHEEL
# are the targets `python` and `wheel` of compose/Dockerfile. pip finds PyTorch in the environment of the first one, and
# downloads nothing: PyTorch as the index has it is gigabytes.
ARG PYTHON
ARG WHEEL
FROM ${WHEEL} AS wheel
FROM ${PYTHON}
COPY --from=wheel /wheels /opt/wheels
COPY examples /opt/ronde/examples
COPY post environment test /definition/
RUN PIP_NO_DEPS=1 PIP_NO_INDEX=1 PYTHONPATH=$(echo /opt/ronde/lib/python3*/site-packages) sh /definition/post
