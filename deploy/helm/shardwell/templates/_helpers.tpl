{{- define "shardwell.name" -}}
{{- if contains .Chart.Name .Release.Name }}{{ .Release.Name | trunc 40 | trimSuffix "-" }}{{ else }}{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 40 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- define "shardwell.labels" -}}
app.kubernetes.io/name: shardwell
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "shardwell.address" -}}
{{ include "shardwell.name" . }}-coordinator.{{ .Release.Namespace }}.svc:50051
{{- end }}

{{- define "shardwell.pod" -}}
automountServiceAccountToken: false
enableServiceLinks: false # their variables, such as SHARDWELL_PORT, look like options
{{- with .Values.imagePullSecrets }}
imagePullSecrets: {{ toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "shardwell.hardened" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{- define "shardwell.serverUser" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{/* Variables of coordinator and shard servers: paths of secrets, and no secret. */}}
{{- define "shardwell.serverEnv" -}}
{{- if .Values.auth.secretName }}
- {name: SHARDWELL_TOKEN_FILE, value: /etc/shardwell/key/key}
{{- end }}
{{- if .Values.tls.secretName }}
- {name: SHARDWELL_TLS_CA, value: /etc/shardwell/tls/ca.crt}
- {name: SHARDWELL_TLS_CERT, value: /etc/shardwell/tls/tls.crt}
- {name: SHARDWELL_TLS_KEY, value: /etc/shardwell/tls/tls.key}
- {name: SHARDWELL_TLS_SERVER_NAME, value: {{ .Values.tls.serverName | quote }}}
{{- end }}
{{- if .Values.insecure }}
- {name: SHARDWELL_INSECURE, value: "1"}
{{- end }}
{{- with .Values.checkpoints.root }}
- {name: SHARDWELL_CHECKPOINT_ROOT, value: {{ . | quote }}}
{{- end }}
{{- if .Values.metrics.enabled }}
- {name: SHARDWELL_METRICS_HOST, value: "0.0.0.0"}
- {name: SHARDWELL_METRICS_PORT, value: {{ .Values.metrics.port | quote }}}
{{- end }}
{{- end }}

{{- define "shardwell.serverMounts" -}}
- {name: tmp, mountPath: /tmp}
- {name: state, mountPath: /var/lib/shardwell}
{{- if .Values.auth.secretName }}
- {name: key, mountPath: /etc/shardwell/key, readOnly: true}
{{- end }}
{{- if .Values.tls.secretName }}
- {name: tls, mountPath: /etc/shardwell/tls, readOnly: true}
{{- end }}
{{- with .Values.shard.volumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "shardwell.serverVolumes" -}}
- {name: tmp, emptyDir: {}}
{{- if .Values.auth.secretName }}
- {name: key, secret: {secretName: {{ .Values.auth.secretName | quote }}, defaultMode: 0440}}
{{- end }}
{{- if .Values.tls.secretName }}
- {name: tls, secret: {secretName: {{ .Values.tls.secretName | quote }}, defaultMode: 0440}}
{{- end }}
{{- with .Values.shard.volumes }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Probes of a server, with a dict of root, port and service. The kubelet's own gRPC probes know no TLS. */}}
{{- define "shardwell.probe" -}}
{{- if .root.Values.tls.secretName -}}
exec: {command: [shardwell-server, health, "localhost:{{ .port }}", --service, {{ .service }}]}
{{- else -}}
grpc: {port: {{ .port }}, service: {{ .service }}}
{{- end }}
timeoutSeconds: 15
{{- end }}

{{- define "shardwell.probes" -}}
startupProbe: # a server that takes up or loads shards
  {{- include "shardwell.probe" . | nindent 2 }}
  periodSeconds: 5
  failureThreshold: 60
readinessProbe:
  {{- include "shardwell.probe" . | nindent 2 }}
  periodSeconds: 30
livenessProbe:
  {{- include "shardwell.probe" . | nindent 2 }}
  periodSeconds: 60
  failureThreshold: 5
{{- end }}

{{- define "shardwell.ports" -}}
- {name: grpc, containerPort: {{ .port }}}
{{- if .root.Values.metrics.enabled }}
- {name: metrics, containerPort: {{ .root.Values.metrics.port }}}
{{- end }}
{{- end }}
