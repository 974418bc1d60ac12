{{- /* A container's securityContext: what the Pod Security Standard "restricted" asks for, and a read-only root. */}}
{{- define "ronde.restricted" -}}
allowPrivilegeEscalation: false
capabilities: {drop: [ALL]}
privileged: false
readOnlyRootFilesystem: {{ .readOnly }}
runAsNonRoot: true
runAsUser: {{ .uid }}
runAsGroup: {{ .gid }}
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "ronde.labels" -}}
app.kubernetes.io/name: ronde
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "ronde.pullSecrets" -}}
{{- with .Values.imagePullSecrets }}
imagePullSecrets: {{ toJson . }}
{{- end }}
{{- end }}

{{- /* The variables of pod.py: which pod this is. */}}
{{- define "ronde.pod" -}}
{{- if eq .Values.form "trainer" -}}
# Kubeflow Trainer adds PET_NNODES, PET_NODE_RANK and PET_NPROC_PER_NODE.
- name: RONDE_JOB
  valueFrom: {fieldRef: {fieldPath: "metadata.labels['jobset.sigs.k8s.io/jobset-name']"}}
{{- else -}}
- {name: RONDE_JOB, value: {{ .Release.Name | quote }}}
- {name: RONDE_NODES, value: {{ .Values.nodes | quote }}}
- {name: RONDE_WORKERS_PER_NODE, value: {{ .Values.workersPerNode | quote }}}
- name: RONDE_NODE
  valueFrom: {fieldRef: {fieldPath: "metadata.labels['batch.kubernetes.io/job-completion-index']"}}
{{- end }}
{{- end }}

{{- define "ronde.prepare" -}}
image: {{ .Values.images.prepare }}
imagePullPolicy: {{ .Values.imagePullPolicy }}
env:
  {{- include "ronde.pod" . | nindent 2 }}
  - {name: RONDE_HOSTS, value: "$(RONDE_JOB)-node-0-{}.$(RONDE_JOB)"}
  - {name: RONDE_PORT, value: {{ .Values.sidecar.port | quote }}}
securityContext:
  {{- include "ronde.restricted" (dict "uid" .Values.sidecar.uid "gid" .Values.worker.uid "readOnly" true) | nindent 2 }}
resources:
  requests: {cpu: 50m, memory: 64Mi}
  limits: {memory: 64Mi}
volumeMounts:
  - {name: ronde-private, mountPath: /run/ronde-private}
  - {name: ronde-tools, mountPath: /run/ronde-tools}
  {{- if ne .Values.credentials.kind "spiffe" }}
  - {name: ronde-secret, mountPath: /run/ronde-secret, readOnly: true}
  {{- end }}
{{- end }}

{{- /* Everything of a pod but what the forms differ in: its name in DNS, and who sets its index. */}}
{{- define "ronde.podSpec" -}}
{{- if eq (int .Values.sidecar.uid) (int .Values.worker.uid) }}
{{- fail "sidecar.uid and worker.uid are equal; give the sidecar a user of its own, so that workers cannot read its keys" }}
{{- end -}}
restartPolicy: Never
# Neither workers nor sidecars call the API of Kubernetes.
automountServiceAccountToken: false
enableServiceLinks: false
terminationGracePeriodSeconds: 30
{{- include "ronde.pullSecrets" . }}
securityContext:
  runAsNonRoot: true
  # The group that owns mounted Secrets and volumes.
  fsGroup: {{ .Values.worker.uid }}
  seccompProfile: {type: RuntimeDefault}
initContainers:
  # Copies the credentials of this pod's sidecar: the sidecar rejects files of root's, which those of Secrets are.
  - name: ronde-prepare
    {{- include "ronde.prepare" . | nindent 4 }}
    args: [--credentials, /run/ronde-secret, --tools, /run/ronde-tools{{ if eq .Values.credentials.kind "spiffe" }}, --files-of-others{{ end }}, /run/ronde-private]
  {{- if has .Values.credentials.kind (list "certificates" "cert-manager") }}
  # Copies them again when they are renewed.
  - name: ronde-renew
    restartPolicy: Always
    {{- include "ronde.prepare" . | nindent 4 }}
    args: [--credentials, /run/ronde-secret, --follow, /run/ronde-private]
  {{- end }}
  {{- if eq .Values.credentials.kind "spiffe" }}
  - name: spiffe-helper
    restartPolicy: Always
    image: {{ .Values.credentials.spiffe.helperImage }}
    args: [-config, /run/spiffe-helper/helper.conf]
    securityContext:
      {{- include "ronde.restricted" (dict "uid" .Values.sidecar.uid "gid" .Values.worker.uid "readOnly" true) | nindent 6 }}
    resources:
      requests: {cpu: 50m, memory: 64Mi}
      limits: {memory: 64Mi}
    volumeMounts:
      - {name: ronde-private, mountPath: /run/ronde-private}
      - {name: spiffe-helper, mountPath: /run/spiffe-helper, readOnly: true}
      - {name: spiffe-workload-api, mountPath: /run/spiffe-workload-api, readOnly: true}
  {{- end }}
  # A native sidecar: it starts before the workers and ends after them.
  - name: ronde-sidecar
    restartPolicy: Always
    image: {{ .Values.images.sidecar }}
    imagePullPolicy: {{ .Values.imagePullPolicy }}
    args:
      - sidecar
      - --config=/run/ronde-private/sidecar.toml
      - --socket-dir=/run/ronde/sockets
      - --worker-uids={{ .Values.worker.uid }}
      - --listen=$(POD_ADDRESS)
      - --start-timeout={{ .Values.sidecar.startTimeout }}
      - --peer-timeout={{ .Values.sidecar.peerTimeout }}
      - --arena-mb={{ .Values.sidecar.arenaMb }}
      - --plugin-state-mb={{ .Values.sidecar.pluginStateMb }}
      {{- if .Values.metrics.enabled }}
      # By name, because an IPv6 address would need brackets.
      - --admin-listen=$(POD_HOST):{{ .Values.metrics.port }}
      {{- end }}
    env:
      - name: POD_ADDRESS
        valueFrom: {fieldRef: {fieldPath: status.podIP}}
      {{- if .Values.metrics.enabled }}
      - name: POD_JOB
        valueFrom: {fieldRef: {fieldPath: "metadata.labels['jobset.sigs.k8s.io/jobset-name']"}}
      - name: POD_INDEX
        valueFrom: {fieldRef: {fieldPath: "metadata.labels['batch.kubernetes.io/job-completion-index']"}}
      - {name: POD_HOST, value: "$(POD_JOB)-node-0-$(POD_INDEX).$(POD_JOB)"}
      {{- end }}
      {{- range .Values.sidecar.env }}
      - {{ toJson . }}
      {{- end }}
    ports:
      - {name: ronde, containerPort: {{ .Values.sidecar.port }}, protocol: TCP}
      - {name: ronde-quic, containerPort: {{ .Values.sidecar.port }}, protocol: UDP}
      {{- if .Values.metrics.enabled }}
      - {name: metrics, containerPort: {{ .Values.metrics.port }}, protocol: TCP}
      {{- end }}
    # Workers start when it serves them.
    startupProbe:
      exec: {command: [/usr/bin/ronde, status, --socket, /run/ronde/sockets, --json]}
      periodSeconds: 2
      timeoutSeconds: 10
      failureThreshold: {{ max 1 (div .Values.sidecar.startTimeout 2) }}
    readinessProbe:
      exec: {command: [/usr/bin/ronde, status, --socket, /run/ronde/sockets, --json]}
      periodSeconds: 30
      timeoutSeconds: 10
    securityContext:
      {{- include "ronde.restricted" (dict "uid" .Values.sidecar.uid "gid" .Values.worker.uid "readOnly" true) | nindent 6 }}
    resources: {{ toJson .Values.sidecar.resources }}
    volumeMounts:
      - {name: ronde-private, mountPath: /run/ronde-private, readOnly: true}
      - {name: ronde-sockets, mountPath: /run/ronde}
containers:
  # Named as Kubeflow Trainer asks for.
  - name: node
    image: {{ .Values.images.worker }}
    imagePullPolicy: {{ .Values.imagePullPolicy }}
    {{- if ne .Values.form "trainer" }}
    command: [python3, /run/ronde-tools/workers.py]
    args: {{ toJson .Values.worker.command }}
    {{- end }}
    env:
      {{- include "ronde.pod" . | nindent 6 }}
      - {name: RONDE_START_TIMEOUT, value: {{ .Values.sidecar.startTimeout | quote }}}
      - {name: HOME, value: /tmp}
      {{- range .Values.worker.env }}
      - {{ toJson . }}
      {{- end }}
    securityContext:
      {{- include "ronde.restricted" (dict "uid" .Values.worker.uid "gid" .Values.worker.uid "readOnly" .Values.worker.readOnlyRootFilesystem) | nindent 6 }}
    resources: {{ toJson .Values.worker.resources }}
    volumeMounts:
      # Read-only: a worker connects to the sockets there, and changes nothing. Tensors travel as descriptors (memfd).
      - {name: ronde-sockets, mountPath: /run/ronde, subPath: sockets, readOnly: true}
      - {name: ronde-tools, mountPath: /run/ronde-tools, readOnly: true}
      - {name: scratch, mountPath: /tmp}
      {{- range .Values.worker.volumeMounts }}
      - {{ toJson . }}
      {{- end }}
volumes:
  # In memory, for as long as the pod lives: the sidecar's configuration and keys, sockets, and scripts for workers.
  - {name: ronde-private, emptyDir: {medium: Memory, sizeLimit: 4Mi}}
  - {name: ronde-sockets, emptyDir: {medium: Memory, sizeLimit: 4Mi}}
  - {name: ronde-tools, emptyDir: {medium: Memory, sizeLimit: 4Mi}}
  - {name: scratch, emptyDir: {sizeLimit: {{ .Values.worker.scratch }}}}
  {{- include "ronde.credentialVolumes" . | nindent 2 }}
  {{- range .Values.worker.volumes }}
  - {{ toJson . }}
  {{- end }}
{{- end }}

{{- define "ronde.credentialVolumes" -}}
{{- if eq .Values.credentials.kind "spiffe" -}}
- {name: spiffe-helper, configMap: {name: {{ .Release.Name }}-spiffe-helper}}
- {name: spiffe-workload-api, csi: {driver: {{ .Values.credentials.spiffe.driver }}, readOnly: true}}
{{- else if eq .Values.credentials.kind "cert-manager" -}}
- name: ronde-secret
  projected:
    defaultMode: 0440
    sources:
      {{- range $index := until (int .Values.nodes) }}
      - secret:
          name: {{ $.Release.Name }}-sidecar-{{ $index }}
          items:
            - {key: tls.crt, path: sidecar-{{ $index }}-cert.pem}
            - {key: tls.key, path: sidecar-{{ $index }}-key.pem}
            - {key: ca.crt, path: sidecar-{{ $index }}-ca.pem}
      {{- end }}
{{- else -}}
- {name: ronde-secret, secret: {secretName: {{ .Values.credentials.secretName }}, defaultMode: 0440}}
{{- end }}
{{- end }}
